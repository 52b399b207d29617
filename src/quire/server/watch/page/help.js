"use strict";
// What each number means, in one or two sentences, shown by the "?" next to it.

const HELP = {
  pool: "The memory of the KV cache, cut into blocks of equal size. Owned blocks belong to requests that run. Reusable ones are free, but still hold a beginning that a new prompt may have. Wasted is the share of owned slots that hold no token yet.",
  saved: "Table entries of all requests, less the blocks they own: as many more blocks would be needed if requests shared none.",
  hits: "Of all prompt tokens asked for so far, the share that was found in the prefix cache and was not computed again.",
  running: "Requests that own blocks and get tokens in each step. Waiting ones stand in the queue; out are those whose blocks were moved to the host's memory.",
  rate: "New tokens of all requests together, in a second. Below it: prompt tokens computed in a second.",
  copies: "Blocks that were copied because a request was about to write into one that others share (copy on write).",
  evictions: "Free blocks whose contents were replaced by new ones, the longest unused first. A prompt that begins like them has to be computed again.",
  preemptions: "Requests that were stopped, as the pool was full, so that those before them could go on. They come back by themselves.",
  swaps: "Blocks that were moved to the host's memory when their request was preempted, and back.",
  map: "Each cell is a block of the pool. Its colour is that of the request that owns it, and it fills from below as tokens come. One with a number has so many owners. Of very many blocks, each tile stands for some of them.",
  byrequest: "Each row is a request, with its blocks in the order of its text. The same block may stand in several rows: then it is shared. The blue mark is where the prompt ends.",
  prefixes: "Cached beginnings as a tree, read from left to right. A trunk is text that sequences have in common, as thick as it has users; a branch is where they begin to differ. Grey is cached and not in use, dashed was evicted.",
  time: "A row for each request: dotted is the queue, blue its prompt in pieces, its own colour is decoding, red is preempted, violet on the host. The columns are steps: prompt tokens in blue, decoded ones in green, on a logarithmic scale; a red line below means that a request waited for blocks.",
  host: "Memory of the host, where blocks of preempted requests wait until there is room again.",
  requests: "Requests by their number: R42, and R42.1 to R42.4 where a prompt has several samples. The line below a count is how far it is towards its longest.",
  columns: "tokens: of the prompt, and new ones. blocks: in its table. age: since it came. queue: time until it first ran. tok/s: new tokens a second since its first one.",
  happens: "A line for each step of the engine: what it computed, and what happened to blocks. Open one to see it in order, the cause above its effect.",
  prompt: "Tokens of the prompt.",
  generated: "New tokens so far, of the most it may have.",
  table: "Entries of its block table, and how many of these blocks have other owners too.",
  queued: "From its arrival to the first step that computed something of it.",
  first: "From its arrival to its first token: the queue, and its prompt.",
  speed: "New tokens in a second, since its first one.",
  owners: "Requests whose tables contain this block.",
  filled: "Slots of the block that hold a token's keys and values.",
  reusable: "Whether a new prompt that begins with the same tokens may use the block. Only full blocks are reused.",
};

let openHelp = null;
function helpButton(topic, name) {
  const button = make("button", { className: "q", textContent: "?", data: { help: topic }, attributes: { "aria-label": `What is ${name}?`, "aria-expanded": "false", "aria-controls": "help" } });
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
