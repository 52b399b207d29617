"use strict";
// The chat page: its settings, buttons and keys.

const { model: MODEL, kind, embedded, key: needsKey } = document.body.dataset;
const isChat = kind === "chat", isEmbedded = Boolean(embedded);
const IDEAS = isEmbedded && isChat ? ["def read_json(path):", "class Stack:", "Sort a list of words by their length."]
  : isChat ? ["Write a function that reads a JSON file.", "Explain recursion with an example."]
  : ["import os\nimport json\n\n\ndef read_config(path):\n", "class Stack:\n    def __init__(self):\n"];

function setBusy(isBusy) { $("send").hidden = isBusy; $("stop").hidden = !isBusy; document.body.classList.toggle("busy", isBusy); }
function openOptions(isOpen) { $("options").hidden = !isOpen; $("settings").setAttribute("aria-expanded", isOpen); }
/** True if a key sends the text: Enter in a chat, and Ctrl+Enter where a text may have lines. */
function isSending(event) { return event.key === "Enter" && !event.shiftKey && !event.isComposing && (isChat || event.ctrlKey || event.metaKey); }
function clear() {
  asking?.abort(CLEARED);
  turns.length = 0;
  shown = null;
  takeImages();
  $("messages").replaceChildren();
  $("hello").hidden = false;
  drawCards();
  $("prompt").focus();
}

$("model").append(make("option", { value: MODEL, textContent: MODEL }));
$("settings").addEventListener("click", () => openOptions($("options").hidden));
$("options").addEventListener("submit", event => event.preventDefault());
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = isChat ? $("prompt").value.trim() : $("prompt").value;
  if (!text && !images.length || asking || reading) return;  // a message is sent with its images
  $("prompt").value = "";
  ask(text, takeImages());
});
$("prompt").addEventListener("keydown", event => {
  if (!isSending(event)) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => asking?.abort());
$("clear").addEventListener("click", clear);
try { $("key").value = sessionStorage.getItem("quire-key") || ""; } catch { /* the key must be entered again */ }
$("key").addEventListener("change", () => {
  try { sessionStorage.setItem("quire-key", $("key").value); } catch { /* the key is stored for this page only */ }
  listModels();
});
$("key").placeholder = needsKey ? "required by this server" : "not required";
if (kind === "vectors") put($("hello-title"), "This model writes no text");
else if (!isChat) { put($("hello-title"), "Begin a text"); $("prompt").placeholder = "A text to continue (Ctrl+Enter sends)"; $("prompt").rows = 4; }
$("limited").hidden = !$("most").value;
$("ideas").append(...IDEAS.map(text => {
  const button = make("button", { type: "button", textContent: text.trim().split("\n").join(" ⏎ ") });
  button.addEventListener("click", () => { $("prompt").value = text; $("prompt").focus(); });
  return button;
}));
addEventListener("pagehide", () => watching?.abort());
addEventListener("quire-theme", () => { readPalette(); redraw(); });
readPalette();
themeButton($("theme"));
listModels();
