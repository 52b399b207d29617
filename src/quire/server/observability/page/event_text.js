"use strict";
// Descriptions of events: of a block, of a request, and of all, folded by step with the cause above its effect.

const nameOf = (state, key) => state.label(key);
const reasons = { stop: "a stop token or text", length: "token limit", abort: "aborted", error: "a failed step" };
const ABOUT_REQUESTS = new Set(["arrived", "ran", "first_token", "preempted", "resumed", "ended"]);
const ABOUT_ALL = new Set(["evicted", "forgotten", "cleared", "step"]);

/** Describes an event for a block: parts that are texts, requests or blocks. Returns null if it does not concern it. */
function describeBlockEvent(event, state, { block, group, isHost }) {
  const [what, , g, key] = event, who = { key };
  if (g !== group || what === "step" || ABOUT_REQUESTS.has(what)) return null;
  if (isHost) {
    if (what === "swapped_out" && holds(event[5], block)) return ["holds block ", { block: expand(event[4])[expand(event[5]).indexOf(block)], group }, " of ", who];
    if (what === "swapped_in" && holds(event[5], block)) return ["brought back for ", who, " to block ", { block: expand(event[4])[expand(event[5]).indexOf(block)], group }];
    if (what === "host_freed" && holds(event[4], block)) return ["freed by ", who];
    return null;
  }
  switch (what) {
    case "allocated": return holds(event[4], block) ? ["allocated to ", who] : null;
    case "shared": return holds(event[4], block) ? ["found in the cache by ", who] : null;
    case "forked": return holds(event[5], block) ? ["shared with ", who, " as a fork of ", { name: event[4] }] : null;
    case "copied": return event[4] === block ? [who, " had to write here, and got the copy ", { block: event[5], group }] : event[5] === block ? ["became a copy of ", { block: event[4], group }, " for ", who] : null;
    case "freed": return holds(event[4], block) ? ["freed by ", who] : null;
    case "swapped_out": return holds(event[4], block) ? [`moved to host block ${expand(event[5])[expand(event[4]).indexOf(block)]} for `, who] : null;
    case "swapped_in": return holds(event[4], block) ? [`back from host block ${expand(event[5])[expand(event[4]).indexOf(block)]} for `, who] : null;
    case "stored": return holds(event[4], block) ? ["full, and reusable as ", { code: event[5][expand(event[4]).indexOf(block)] }] : null;
    case "evicted": return holds(event[3], block) ? ["evicted: its memory was needed (was ", { code: event[4][expand(event[3]).indexOf(block)] }, ")"] : null;
    case "forgotten": return holds(event[3], block) ? ["forgotten: its request continued, and no other prompt is likely to begin like it (was ", { code: event[4][expand(event[3]).indexOf(block)] }, ")"] : null;
    case "cleared": return ["the prefix cache was reset"];
  }
  return null;
}

/** Describes an event for a request. */
function describeRequestEvent(event, state, key) {
  const [what] = event, isOwn = ABOUT_REQUESTS.has(what);
  if (ABOUT_ALL.has(what) || (isOwn ? event[2] : event[3]) !== key) return null;
  const group = event[2], where = !isOwn && state.pools.length > 1 ? ` in group ${group}` : "";
  const chips = runs => { const blocks = expand(runs); return [...blocks.slice(0, 5).map(block => ({ block, group })), blocks.length > 5 ? " …" : ""]; };
  switch (what) {
    case "arrived": return [`arrived with ${plural(event[4], "prompt token")}`];
    case "ran": {
      const request = state.requests.get(key), waited = request?.arrived != null ? event[1] - request.arrived : 0, hold = waited > 0.05 ? state.holdBetween(request.arrived, event[1]) : null;
      return [`started to run${waited > 0.05 ? ` after ${duration(waited)} in the queue${hold ? ` (${HOLDS[hold]})` : ""}` : ""}${event[3] ? `: ${event[3].text}` : ""}`];
    }
    case "first_token": { const request = state.requests.get(key); return ["first token" + (request?.arrived != null ? `, ${(event[1] - request.arrived).toFixed(2)} s after it arrived` : "")]; }
    case "preempted": return [event[3] === "swapped" ? "preempted: moved to the host" : "preempted: its blocks were freed, and will be recomputed"];
    case "resumed": return ["resumed"];
    case "ended": return [`ended after ${plural(event[6], "token")}${event[8] ? `, ${fmt(event[9])} of ${plural(event[8], "draft")} accepted` : ""}: ${reasons[event[4]] || event[4]}${event[7] ? ` (${event[7]})` : ""}`];
    case "allocated": return [`got ${plural(countOf(event[4]), "block")}${where} `, ...chips(event[4])];
    case "shared": return [`found ${plural(countOf(event[4]), "block")} in the cache${where} `, ...chips(event[4])];
    case "forked": return ["forked from ", { name: event[4] }, `: shares ${plural(countOf(event[5]), "block")}${where} `, ...chips(event[5])];
    case "copied": return ["copied ", { block: event[4], group }, " to ", { block: event[5], group }, " before writing"];
    case "freed": return [`freed ${plural(countOf(event[4]), "block")}${where}`];
    case "swapped_out": return [`${plural(countOf(event[4]), "block")}${where} moved to the host`];
    case "swapped_in": return [`${plural(countOf(event[4]), "block")}${where} came back from the host `, ...chips(event[4])];
    case "host_freed": return [`freed ${plural(countOf(event[4]), "host block")}${where}`];
    case "stored": return [`${plural(countOf(event[4]), "full block")}${where} can be reused `, ...chips(event[4])];
  }
  return null;
}

/** Describes an event if nothing is selected. */
function describeEvent(event, state) {
  const [what, , g] = event;
  if (what === "evicted") return [`${plural(countOf(event[3]), "block")} evicted `, ...expand(event[3]).slice(0, 4).map(block => ({ block, group: g })), countOf(event[3]) > 4 ? " …" : ""];
  if (what === "cleared") return ["the prefix cache was reset"];
  if (what === "stored" || what === "forgotten" || what === "step") return null;
  const key = ABOUT_REQUESTS.has(what) ? event[2] : event[3];
  if (key < 0) return [`${shortName(event[3])} ended before its first step`];
  const told = describeRequestEvent(event, state, key);
  return told && [{ key }, " ", ...told];
}

/** Returns up to `most` of the latest steps, each with its events. Steps that only decoded are merged into one. */
function foldSteps(state, most) {
  const folded = [];
  let open = { step: null, last: null, events: [], decoded: 0, count: 0 };
  const close = () => { if (open.step || open.events.length) folded.push(open); };
  for (let i = state.log.length - 1; i >= 0 && folded.length < most; i--) {
    const event = state.log[i];
    if (event[0] !== "step") { if (event[0] !== "stored" && event[0] !== "forgotten") open.events.unshift(event); continue; }
    const isQuiet = !event[4] && open.step && !open.step[4] && !open.events.length && !hasNews(state.log, i);
    if (isQuiet) { open.first = event; open.decoded += event[5]; open.count++; continue; }
    close();
    open = { step: event, first: event, events: [], decoded: event[5], count: 1 };
  }
  if (folded.length < most) close();
  return folded;
}
/** Returns whether the step at index `at` of the log has other events than tokens. */
function hasNews(log, at) {
  const before = log[at - 1];
  return before !== undefined && before[0] !== "step" && before[0] !== "stored" && before[0] !== "forgotten";
}

/** Describes a step in one line. */
function describeStep({ step, first, events, decoded, count }, state) {
  const sum = (what, at) => events.reduce((total, event) => total + (event[0] === what ? countOf(event[at]) : 0), 0), times = what => events.filter(event => event[0] === what).length;
  const began = events.filter(event => event[0] === "ran"), parts = [];
  if (decoded) parts.push(`${fmt(decoded)} decoded`);
  if (began.length) {
    const tokens = began.reduce((total, event) => total + (state.requests.get(event[2])?.prompt || 0), 0), cached = began.reduce((total, event) => total + (event[3]?.cached || 0), 0);
    parts.push(`${plural(began.length, "prompt")} of ${plural(tokens, "token")} began${cached ? ` (${fmt(cached)} cached)` : ""}`);
  }
  if (step?.[4]) parts.push(`${plural(step[4], "prompt token")} computed`);
  const arrived = times("arrived") - began.length;
  if (arrived > 0) parts.push(`${arrived} arrived`);
  for (const [what, at, word] of [["allocated", 4, "allocated"], ["shared", 4, "found in the cache"], ["forked", 5, "shared by forks"], ["evicted", 3, "evicted"], ["swapped_out", 4, "moved to the host"], ["swapped_in", 4, "brought back"]]) {
    const blocks = sum(what, at);
    if (blocks) parts.push(`${plural(blocks, "block")} ${word}`);
  }
  for (const [what, word] of [["copied", "copied"], ["preempted", "preempted"], ["resumed", "resumed"], ["ended", "ended"], ["cleared", "reset of the prefix cache"]]) if (times(what)) parts.push(`${times(what)} ${word}`);
  const name = !step ? "since then" : count > 1 ? `steps ${fmt(first[2])}–${fmt(step[2])}` : `step ${fmt(step[2])}`;
  return [name, parts.join(", ") || "nothing new"];
}

function describeBlock(view, block) {
  const { refs, cached, fill, blockSize } = view.pool;
  if (!refs[block]) return cached[block] ? "free, still reusable" : "free";
  const owners = view.state.ownersOf(view.isHost, view.group, block), first = owners[0] ? view.state.label(owners[0].request.key) : "a request";
  return `${refs[block] > 1 ? `shared by ${refs[block]}` : `owned by ${first}`}${view.isHost ? "" : `, ${fill[block]} of ${blockSize} tokens`}`;
}

/** Describes a request in one line. */
function describeState(state, request) {
  const parts = [`${fmt(request.prompt)} prompt + ${fmt(request.generated)} new tokens`], speed = speedOf(request, state.time), queued = queuedFor(request, state.time);
  const word = request.state === "ended" ? `ended: ${request.reason}` : request.state;
  if (queued !== null && queued > 0.005) parts.push(`queued ${duration(queued)}`);
  if (speed) parts.push(`${speed < 10 ? speed.toFixed(1) : fmt(speed)} tokens/s`);
  return `${word}, ${parts.join(", ")}`;
}
const ageOf = (request, time) => request.arrived === null ? null : (request.over ?? time) - request.arrived;
const queuedFor = (request, time) => request.arrived === null ? null : (request.ran ?? request.over ?? time) - request.arrived;
function speedOf(request, time) {
  if (request.spoke === null || request.generated < 2) return null;
  const spent = (request.over ?? time) - request.spoke;
  return spent > 0 ? (request.generated - 1) / spent : null;
}

/** Converts the parts of a description to nodes. */
function nodes(parts, state) {
  return parts.map(part => {
    if (typeof part === "string") return part;
    if (part.code !== undefined) return make("span", { className: "mono", textContent: part.code });
    if (part.name !== undefined) {
      const parent = [...state.requests.values()].find(request => request.id === part.name);
      return parent ? requestChip(parent.key, state) : make("span", { className: "name", textContent: shortName(part.name) });
    }
    return part.key !== undefined ? requestChip(part.key, state) : blockChip(part.block, part.group);
  });
}
function chip(label, wanted) {
  const button = make("button", { className: "chip" }, make("span", { className: "clip", textContent: label }));
  button.addEventListener("click", () => select(wanted));
  return button;
}
function requestChip(key, state, extra = "") {
  const button = chip(state.label(key) + extra, { key });
  button.prepend(make("span", { className: "swatch", css: { "--own": ownerColour(key).css } }));
  button.title = state.requests.get(key)?.id ?? ""; button.classList.add("who");
  button.addEventListener("pointerenter", () => setHovered(key));
  button.addEventListener("pointerleave", () => setHovered(null));
  return button;
}
const blockChip = (block, group) => chip(String(block), { block, group, isHost: false });

// The tip next to the pointer. Its owner updates it, and only its owner hides it.
let tipOwner = null;
function showTip(owner, title, text, x, y) {
  const tip = $("tip");
  tipOwner = owner;
  tip.replaceChildren(make("b", { textContent: title }), ` ${text}`);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(innerWidth - box.width - 6, x + 14)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
function hideTip(owner) { if (tipOwner === owner) { tipOwner = null; $("tip").hidden = true; } }
