// Of a page, what cannot be read: texts of too little contrast (4.5 to 1, and 3 to 1 for large ones, as WCAG has it), and
// what lies outside the window or has been squeezed until nothing is left of it. What is dimmed or disabled is left out.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = css => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const linear = x => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const chain = one => one ? [one, ...chain(one.parentElement)] : [];
  const ground = one => {
    const layers = [];
    for (const each of chain(one)) { layers.push(rgba(getComputedStyle(each).backgroundColor)); if (layers.at(-1)[3] === 255) break; }
    return layers.reduceRight((below, [r, g, b, a]) => [r, g, b].map((x, i) => x * a / 255 + below[i] * (1 - a / 255)), [255, 255, 255]);
  };
  const faults = [], root = document.documentElement;
  if (root.scrollWidth > innerWidth) faults.push(`the page is ${root.scrollWidth} wide`);
  for (const one of document.querySelectorAll(".panel, .scroll, button, input, textarea, select")) {
    if (!one.checkVisibility({ visibilityProperty: true })) continue;
    const box = one.getBoundingClientRect();
    if (box.height < 12 || box.left < -1 || (box.right > innerWidth + 1 && !one.closest(".scroll"))) faults.push(`${one.id || one.className || one.tagName} is at ${box.left}, ${box.width} x ${box.height}`);
  }
  for (const one of document.querySelectorAll("body *")) {
    const text = [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim()).join("");
    if (!text || one.closest("svg, .sr, script, style, option, :disabled") || !one.checkVisibility({ visibilityProperty: true })) continue;
    if (chain(one).some(each => +getComputedStyle(each).opacity < 1)) continue;
    const style = getComputedStyle(one), [a, b] = [light(rgba(style.color)), light(ground(one))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), most = size >= 24 || (size >= 18.5 && style.fontWeight >= 600) ? 3 : 4.5;
    if ((a + 0.05) / (b + 0.05) < most) faults.push(`${text.slice(0, 30)}: ${((a + 0.05) / (b + 0.05)).toFixed(2)} to 1`);
  }
  return faults;
})()
