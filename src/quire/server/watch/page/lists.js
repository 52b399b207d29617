"use strict";
// The list of requests, siblings under their prompt, and lists of which only the rows that can be seen exist.

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
  row.dataset.key = request.key; row.dataset.state = request.state; row.title = `${request.id}: ${tellState(timeline.state, request)}`; row.tabIndex = 0;
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

// What stands first. Running ones come before those that wait, and what has ended is last, in every order.
const ORDERS = {
  newest: (a, b) => b.family - a.family,
  blocks: (a, b) => sumOf(b.tables) + sumOf(b.hosts) - sumOf(a.tables) - sumOf(a.hosts),
  queued: (a, b) => (queuedFor(b, 0) ?? 0) - (queuedFor(a, 0) ?? 0),
  slowest: (a, b) => (speedOf(a, timeline.state.time) ?? Infinity) - (speedOf(b, timeline.state.time) ?? Infinity),
};
function drawRequests(state) {
  const lists = { waiting: [], swapped: [], running: [], ended: [] }, order = ORDERS[$("order").value];
  for (const request of state.requests.values()) lists[request.state].push(request);
  const items = [];
  for (const name of ["running", "swapped", "waiting", "ended"]) {
    const families = new Map();
    for (const request of lists[name]) { if (!families.has(request.family)) families.set(request.family, []); families.get(request.family).push(request); }
    const groups = [...families.values()];
    for (const group of groups) group.sort((a, b) => a.sample - b.sample || a.key - b.key);
    groups.sort(name === "ended" ? (a, b) => Math.max(...b.map(one => one.over)) - Math.max(...a.map(one => one.over)) : (a, b) => order(a[0], b[0]) || b[0].family - a[0].family);
    for (const group of groups) {
      const isOne = group.length === 1;
      if (!isOne) items.push({ family: group });
      for (const request of group) items.push({ request, isSibling: !isOne });
    }
  }
  requestRows.show(items);
  document.querySelector("#requests .empty").hidden = state.requests.size > 0;
  document.querySelector("#requests .rows").hidden = state.requests.size === 0;
  put($("reqsum"), ["running", "swapped", "waiting", "ended"].filter(name => lists[name].length).map(name => `${fmt(lists[name].length)} ${name}`).join(" · "));
}
