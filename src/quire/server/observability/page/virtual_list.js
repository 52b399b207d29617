"use strict";
// The list of requests, with siblings under their prompt, and lists in which only the visible rows exist.

class Rows {
  constructor(root, height, make, fill) {
    Object.assign(this, { root, inner: root.firstElementChild, height, make, fill, items: [], rows: [] });
    root.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(root);
  }
  show(items) { this.items = items; this.inner.style.height = items.length * this.height + "px"; this.draw(); }
  draw() {
    const first = Math.max(0, Math.floor(this.root.scrollTop / this.height)), count = Math.min(this.items.length - first, Math.ceil(this.root.clientHeight / this.height) + 1);
    while (this.rows.length < count) this.rows.push(this.inner.appendChild(this.make()));
    this.rows.forEach((row, i) => {
      row.hidden = i >= count;
      if (i >= count) return;
      row.style.top = (first + i) * this.height + "px";
      this.fill(row, this.items[first + i], first + i);
    });
  }
}
function makeRow(classes) {
  return make("button", { className: "row" }, ...classes.map(className => make("span", { className })));
}

const requestRows = new Rows(document.querySelector("#requests .rows"), 27, () => {
  const row = makeRow(["swatch", "who", "id clip muted", "state", "progress", "num", "num", "num", "num"]);
  row.addEventListener("click", () => { if (row.dataset.key) select({ key: +row.dataset.key }); });
  row.addEventListener("pointerenter", () => { row.isOver = true; if (row.dataset.key) setHovered(+row.dataset.key); });
  row.addEventListener("pointerleave", () => { row.isOver = false; setHovered(null); });
  row.addEventListener("focus", () => { if (row.dataset.key && row.matches(":focus-visible")) setHovered(+row.dataset.key); });
  row.addEventListener("blur", () => setHovered(null));
  return row;
}, (row, { request, family, isSibling }) => {
  const [swatch, who, id, state, progress, blocks, age, queued, speed] = row.children, now = timeline.state.time;
  row.classList.toggle("family", Boolean(family)); row.classList.toggle("sibling", Boolean(isSibling));
  if (family) {  // a prompt of several samples
    const [first] = family;
    row.dataset.key = ""; row.dataset.state = ""; row.setAttribute("aria-pressed", false); row.tabIndex = -1;
    put(who, `R${first.family + 1}`); put(id, shortName(first.id.replace(/-\d+$/, ""))); row.title = first.id.replace(/-\d+$/, "");
    put(state, plural(family.length, "sample")); put(progress, `${fmt(first.prompt)} prompt`); progress.style.setProperty("--done", "0%");
    for (const cell of [blocks, age, queued, speed]) put(cell, "");
    return;
  }
  const colour = ownerColour(request.key).css, waited = queuedFor(request, now), rate = speedOf(request, now), lived = ageOf(request, now);
  if (row.isOver && row.dataset.key !== String(request.key)) setHovered(request.key);
  row.dataset.key = request.key; row.dataset.state = request.state; row.title = `${request.id}: ${describeState(timeline.state, request)}`; row.tabIndex = 0;
  row.setAttribute("aria-pressed", selection?.key === request.key);
  swatch.style.setProperty("--own", colour);
  put(who, timeline.state.label(request.key)); put(id, isSibling ? "" : shortName(request.id));
  put(state, request.state === "ended" ? request.reason : request.state);
  put(progress, isSibling ? `+ ${fmt(request.generated)}` : `${fmt(request.prompt)} + ${fmt(request.generated)}`);
  progress.style.setProperty("--own", colour);
  progress.style.setProperty("--done", Math.min(100, 100 * (request.prompt + request.generated) / Math.max(1, request.limit)) + "%");
  put(blocks, request.state === "ended" ? "–" : fmt(sumOf(request.tables) || sumOf(request.hosts)));
  put(age, lived === null ? "–" : duration(lived)); put(queued, waited === null ? "–" : waited < 0.005 ? "0" : duration(waited));
  put(speed, rate ? (rate < 10 ? rate.toFixed(1) : fmt(rate)) : "–");
});

// The orders of requests. In each, running ones precede waiting ones, and ended ones are last.
const ORDERS = {
  newest: (a, b) => b.family - a.family,
  blocks: (a, b) => sumOf(b.tables) + sumOf(b.hosts) - sumOf(a.tables) - sumOf(a.hosts),
  queued: (a, b) => (queuedFor(b, 0) ?? 0) - (queuedFor(a, 0) ?? 0),
  slowest: (a, b) => (speedOf(a, timeline.state.time) ?? Infinity) - (speedOf(b, timeline.state.time) ?? Infinity),
};
const STATES = ["running", "swapped", "waiting", "ended"];
function drawRequests(state) {
  const order = ORDERS[$("order").value], counts = Object.fromEntries(STATES.map(name => [name, 0])), families = new Map();
  for (const request of state.requests.values()) {
    counts[request.state]++;
    if (!families.has(request.family)) families.set(request.family, []);
    families.get(request.family).push(request);
  }
  const groups = [...families.values()].map(members => {  // siblings stay together, at the position of the most active one
    members.sort((a, b) => a.sample - b.sample || a.key - b.key);
    const rank = Math.min(...members.map(one => STATES.indexOf(one.state)));
    return { members, rank, lead: members.find(one => one.state === STATES[rank]), over: Math.max(...members.map(one => one.over ?? 0)) };
  });
  groups.sort((a, b) => a.rank - b.rank || (a.lead.state === "ended" ? b.over - a.over : order(a.lead, b.lead)) || b.lead.family - a.lead.family);
  const items = [];
  for (const { members } of groups) {
    const isOne = members.length === 1;
    if (!isOne) items.push({ family: members });
    for (const request of members) items.push({ request, isSibling: !isOne });
  }
  requestRows.show(items);
  document.querySelector("#requests .empty").hidden = state.requests.size > 0;
  document.querySelector("#requests .rows").hidden = state.requests.size === 0;
  put($("reqsum"), STATES.filter(name => counts[name]).map(name => `${fmt(counts[name])} ${name}`).join(" · "));
}
