"use strict";
// Explanations of the numbers in one or two sentences, shown by the "?" next to each.

const HELP = {
  pool: "The memory of the KV cache, divided into blocks of equal size. Owned blocks belong to running requests. Reusable ones are free, but still contain a prefix that a new prompt may have. Wasted is the share of owned slots without a token.",
  saved: "The table entries of all requests minus the blocks they own: without sharing, this many more blocks would be needed.",
  hits: "The share of all prompt tokens so far that was found in the prefix cache and was not computed again.",
  running: "Requests that own blocks and get tokens in each step. Waiting ones are in the queue; out are those whose blocks were moved to the host's memory.",
  rate: "New tokens of all requests together, in a second. Below it: prompt tokens computed in a second, and the draft tokens so far that were accepted or rejected.",
  copies: "Blocks that were copied because a request had to write into one that others share (copy on write).",
  evictions: "Free blocks whose contents were replaced by new ones, the least recently used first. A prompt that begins like them must be computed again.",
  preemptions: "Requests that were stopped because the pool was full, so that earlier ones could continue. They resume automatically.",
  swaps: "Blocks that were moved to the host's memory when their request was preempted, and back.",
  map: "Each cell is a block of the pool. It has the colour of the request that owns it, and is filled from the bottom as tokens arrive. A number in a cell is its number of owners. If there are very many blocks, a tile shows several of them.",
  byrequest: "Each row is a request, with its blocks in the order of its text. A block that is in several rows is shared. The blue mark shows the end of the prompt.",
  prefixes: "Cached prefixes as a tree, from left to right. A trunk is text that sequences have in common, the thicker the more users it has; a branch is where they begin to differ. Grey is cached and not in use, dashed was evicted.",
  time: "A row for each request: dotted is the queue, blue its prompt in chunks, its own colour is decoding, red is preempted, violet on the host. The columns are steps: prompt tokens in blue, decoded ones in green, on a logarithmic scale; a red line below means that a request waited for blocks.",
  host: "Memory of the host, where blocks of preempted requests wait until there is room again.",
  requests: "Requests by their number: R42, and R42.1 to R42.4 if a prompt has several samples. The line below a count shows the progress to the request's maximum length.",
  columns: "tokens: of the prompt, and new ones. blocks: in its table. age: since its arrival. queue: time until it first ran. tok/s: new tokens a second since its first one.",
  happens: "A line for each step of the engine: its tokens, and the events of blocks. Open one to see the events in order, the cause above its effect.",
  prompt: "Tokens of the prompt.",
  generated: "New tokens so far, and their maximum.",
  table: "Entries of its block table, and the number of these blocks that have other owners too.",
  queued: "From its arrival to its first step.",
  first: "From its arrival to its first token: the queue, and its prompt.",
  speed: "New tokens in a second, since its first one.",
  drafts: "Draft tokens whose rows were computed for it in its steps. Accepted ones are those that it drew anyway; the rows after a rejected one are lost.",
  owners: "Requests whose tables contain this block.",
  filled: "Slots of the block with a token's keys and values.",
  reusable: "Whether a new prompt that begins with the same tokens may use the block. Only full blocks are reused.",
};

let openHelp = null;
function helpButton(topic, name) {
  const button = make("button", { className: "q", textContent: "?", data: { help: topic }, attributes: { "aria-label": `Help: ${name}`, "aria-expanded": "false", "aria-controls": "help" } });
  return wireHelp(button);
}
function wireHelp(button) {
  button.addEventListener("click", event => { event.stopPropagation(); if (openHelp === button) closeHelp(); else showHelp(button); });
  return button;
}
function showHelp(button) {
  closeHelp();
  const help = $("help"), box = button.getBoundingClientRect();
  openHelp = button;
  button.setAttribute("aria-expanded", "true");
  put(help, HELP[button.dataset.help]);
  help.hidden = false;
  const own = help.getBoundingClientRect(), below = box.bottom + 8 + own.height < innerHeight;
  help.style.left = Math.max(8, Math.min(innerWidth - own.width - 8, box.left - 14)) + "px";
  help.style.top = (below ? box.bottom + 8 : box.top - own.height - 8) + "px";
}
function closeHelp() {
  if (!openHelp) return false;
  openHelp.setAttribute("aria-expanded", "false");
  openHelp = null;
  $("help").hidden = true;
  return true;
}
for (const button of document.querySelectorAll(".q")) wireHelp(button);
addEventListener("click", event => { if (!event.target.closest("#help")) closeHelp(); });
