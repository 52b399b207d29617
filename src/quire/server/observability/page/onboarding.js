"use strict";
// The welcome: an explanation of blocks, an example request, and a recorded demonstration with captions.

let isOnboardingClosed = false;
const isServed = location.protocol.startsWith("http");

function tryCommand(state) {
  const model = state?.about.model ?? "MODEL";
  return `curl ${location.origin}/v1/completions \\\n  -H "Content-Type: application/json" \\\n  -d '${JSON.stringify({ model, prompt: "import os\n", max_tokens: 64 })}'`;
}
/** Shows the welcome until there is a request, and without a server the place to drop a file. */
function drawOnboarding(state) {
  const isQuiet = state && fileName === null && !isOnboardingClosed && state.requests.size === 0 && !state.gauges.prompt_tokens;
  $("welcome").hidden = !isQuiet;
  $("nofile").hidden = isServed || Boolean(state);
  if (!isQuiet || $("try").dataset.model === String(state.about.model)) return;
  $("try").dataset.model = String(state.about.model);
  put($("try"), tryCommand(state));
  put($("w-size"), String(state.config.block_size));
}
async function copyCommand() {
  let isDone = true;
  try { await navigator.clipboard.writeText($("try").textContent); }
  catch {  // without https there is no clipboard, but the selected text can be copied by hand
    getSelection().selectAllChildren($("try"));
    isDone = document.execCommand("copy");
  }
  put($("copy"), isDone ? "Copied" : "Press Ctrl+C");
  setTimeout(() => put($("copy"), "Copy"), 2000);
}
async function playDemo() {
  try {
    const answer = await fetch("inspector/demo");
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    openRecording("Demo", readRecording(await answer.text()));
    play();
  } catch (error) { toast(`The demo cannot be played: ${error.message}`); }
}

/** Draws the chapters of a recording as marks on the scrubber, and the caption of the current one. */
function drawChapters() {
  const { chapters } = timeline, mark = `${fileName}/${chapters.length}/${timeline.end}`, shown = fileName === null ? null : timeline.chapter();
  if ($("marks").dataset.mark !== mark) {
    $("marks").dataset.mark = mark;
    $("marks").replaceChildren(...chapters.map(chapter => {
      const button = make("button", { title: chapter.title, css: { left: `${100 * chapter.at / Math.max(1, timeline.end)}%` }, attributes: { "aria-label": `Chapter: ${chapter.title}` } });
      button.addEventListener("click", () => { const wasPlaying = playing; goTo(chapter.at); if (wasPlaying) play(); });
      return button;
    }));
  }
  [...$("marks").children].forEach((button, i) => { if (chapters[i] === shown) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current"); });
  $("caption").hidden = !shown;
  if (shown) { put($("caption").firstElementChild, shown.title); put($("caption").lastElementChild, shown.caption); }
}

$("copy").addEventListener("click", copyCommand);
for (const id of ["demo", "demo2"]) $(id).addEventListener("click", playDemo);
$("hide").addEventListener("click", () => { isOnboardingClosed = true; wake(); });
$("demo2").hidden = !isServed;
