"use strict";
// The images of the next message: dropped, pasted or chosen, and shown until they are sent.

const readsImages = Boolean(document.body.dataset.images);
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];  // those that a server decodes
const MAX_FILE = 700_000, MAX_PIXELS = 2 ** 24;  // above which an image is made smaller: a body has a limit, and an image
const MAX_SIDE = 2048;           // pixels of a smaller image
let images = [];                 // {name, url}: data URLs
let reading = 0;                 // calls of addImages that have not ended

/** Returns the data URL of a file: of its bytes, or of a smaller JPEG if it has many. Throws if it is no image. */
async function dataUrl(file) {
  const bitmap = await createImageBitmap(file), scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (file.size <= MAX_FILE && bitmap.width * bitmap.height <= MAX_PIXELS) {
    bitmap.close();
    return new Promise((done, failed) => { const reader = new FileReader(); reader.onload = () => done(reader.result); reader.onerror = failed; reader.readAsDataURL(file); });
  }
  const canvas = make("canvas", { width: Math.max(1, scale * bitmap.width), height: Math.max(1, scale * bitmap.height) }), paper = canvas.getContext("2d");
  paper.fillStyle = "white";
  paper.fillRect(0, 0, canvas.width, canvas.height);
  paper.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
async function addImages(files) {
  const refused = [];
  reading++;
  for (const file of files) {
    try {
      if (!TYPES.includes(file.type)) throw new TypeError(file.type);
      images.push({ name: file.name, url: await dataUrl(file) });
    } catch { refused.push(file.name); }
  }
  reading--;
  put($("refused"), refused.length ? `${refused.join(", ")}: an image is a PNG, JPEG, WebP, GIF or BMP file.` : "");
  drawImages();
  $("prompt").focus();
}
function drawImages() {
  $("images").replaceChildren(...images.map(image => {
    const button = make("button", { type: "button", textContent: "×", attributes: { "aria-label": `Remove ${image.name}` } });
    button.addEventListener("click", () => { images = images.filter(one => one !== image); drawImages(); });
    return make("li", {}, make("img", { src: image.url, alt: image.name }), button);
  }));
}
/** Returns the images of the message that is sent, and begins the next one without any. */
function takeImages() {
  const taken = images;
  images = [];
  put($("refused"), "");
  drawImages();
  return taken;
}
const hasFiles = event => readsImages && [...event.dataTransfer?.types || []].includes("Files");
$("choose").hidden = !readsImages;
$("choose").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { addImages([...$("files").files]); $("files").value = ""; });
$("prompt").addEventListener("paste", event => {
  const { files: [...files], types } = event.clipboardData;
  if (!readsImages || !files.length || types.includes("text/plain")) return;  // office programs add a picture of the text
  event.preventDefault();
  addImages(files);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("talk").addEventListener(kind, event => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    $("talk").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") addImages([...event.dataTransfer.files]);
  });
}
