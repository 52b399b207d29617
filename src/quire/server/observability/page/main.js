"use strict";
// The page: the selection, the current view, the drawing loop, the scrubber, and the actions of buttons and keys.

const VIEWS = ["pool", "requests", "prefixes", "time"];
const timeline = new Timeline();
const device = new BlockMap($("device"), false), host = new BlockMap($("host"), true), minimap = new Minimap($("minimap"), device);
const logical = new RequestMap($("rows")), tree = new TreeView($("tree")), gantt = new TimeView($("time"));
let selection = null;       // {key} of a request, or {block, group, isHost}; null: nothing
let hovered = null;         // key of the request under the pointer
let view = "pool";
let shownGroup = 0;
let fileName = null;        // of the open recording
let playing = null;         // {wall, at}: the recording's time, and the page's time at which it was set
let link = null, status = ["waiting", "Connecting"], lastHeard = 0;
let panelsDue = 0, storyMark = "";
const ghost = { state: null };  // the state that the views show

/** Returns the key of the highlighted request: the one under the pointer, else the selected one. */
const focusKey = () => hovered ?? selection?.key;
function refocus() {
  for (const map of [device, host]) map.needsAll = map.fxDirty = true;
  wake();
}
function setHovered(key) { if (hovered !== key) { hovered = key; refocus(); } }
function select(wanted) {
  selection = wanted;
  if (wanted && wanted.group !== undefined && wanted.group !== shownGroup) showGroup(wanted.group);
  storyMark = ""; panelsDue = 0;
  $("d-story").scrollTop = $("table").scrollTop = 0;
  document.querySelector("#panes [data-pane=details]").classList.toggle("news", Boolean(wanted));
  refocus();
}
function showGroup(group) {
  shownGroup = group;
  const state = timeline.state;
  device.show(state, group);
  if (state.config.num_host_blocks) host.show(state, group);
  logical.show(state, group); tree.show(state, group); gantt.show(state);
  [...$("tabs").children].forEach((tab, i) => { tab.setAttribute("aria-selected", i === group); tab.tabIndex = i === group ? 0 : -1; });
  panelsDue = 0; storyMark = "";
  wake();
}
async function setView(name) {
  if (name === view) return;
  const moves = timeline.state && ["pool", "requests"].includes(name) && ["pool", "requests"].includes(view);
  view = document.body.dataset.view = name;
  VIEWS.forEach(one => { const tab = $("v-" + one); tab.setAttribute("aria-selected", one === name); tab.tabIndex = one === name ? 0 : -1; });
  document.querySelector("#mapside .q").dataset.help = { pool: "map", requests: "byrequest", prefixes: "prefixes", time: "time" }[name];
  $("tip").hidden = true; hovered = null; panelsDue = 0;
  logical.needsAll = true; gantt.version = ""; tree.mark = ""; tree.due = 0;
  refocus();
  if (moves) { logical.layout(); logical.arrange(); await moveBlocks($("moving"), device, logical, name === "requests"); wake(); }
}

/** Adopts a new state object, after a snapshot or a jump. */
function adopt() {
  const state = timeline.state, config = state.config, isNew = ghost.state?.epoch !== state.epoch;
  ghost.state = state;
  if (isNew) {
    shownGroup = Math.min(shownGroup, config.windows.length - 1);
    $("hostside").hidden = !config.num_host_blocks;
    $("tabs").hidden = config.windows.length < 2;
    $("tabs").replaceChildren(...(config.windows.length > 1 ? config.windows : []).map((window, g) => {
      const kind = { attention: window === null ? "Full attention" : `Window ${fmt(window)}`, states: "States", rows: "Rows of open pieces" }[config.kinds[g]];
      const tab = make("button", { textContent: `${kind} · ${plural(config.layers[g], "layer")}`, attributes: { role: "tab" } });
      tab.addEventListener("click", () => showGroup(g));
      tabKeys(tab, $("tabs"), g, showGroup);
      return tab;
    }));
    const about = Object.entries(state.about).map(([name, value]) => name === "model" ? String(value) : `${name} ${value}`);
    put($("about"), [...about, `${fmt(config.num_blocks)} blocks of ${plural(config.block_size, "token")}`].join("  ·  "));
    $("about").title = $("about").textContent;
    selection = null;
  }
  showGroup(shownGroup);
}
function tabKeys(tab, list, at, go) {
  tab.addEventListener("keydown", event => {
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1 }[event.key];
    if (next >= 0 && next < list.children.length) { event.preventDefault(); event.stopPropagation(); go(next); list.children[next].focus(); }
  });
}

// ------------------------------------------------------------------------------------------------------ drawing

function wake() { if (!wake.isDue) { wake.isDue = true; requestAnimationFrame(frame); } }
function frame(now) {
  const begun = performance.now();
  wake.isDue = false;
  if (playing) advance(now);
  const state = timeline.state;
  if (state) {
    if (ghost.state !== state) adopt();
    if (state.effects?.length) showEffects(state, now);
    if (view === "pool") { device.draw(now); if (state.config.num_host_blocks) host.draw(now); }
    else for (const map of [device, host]) if (map.pool?.dirty.length) { map.pool.clean(); map.needsAll = true; }
    if (view === "requests") logical.draw();
    if (view === "prefixes") tree.draw(now);
    if (view === "time") gantt.draw();
    if (now >= panelsDue) { panelsDue = now + 150; drawPanels(state); }
    else wake.timer ||= setTimeout(() => { wake.timer = 0; wake(); }, panelsDue - now + 5);
  }
  drawOnboarding(state);
  drawTimeline();
  if (playing || device.flashes.length || host.flashes.length) wake();
  const ms = performance.now() - begun;
  frame.count++; frame.ms += ms; frame.worst = Math.max(frame.worst, ms);
}
frame.count = frame.ms = frame.worst = 0;
function showEffects(state, now) {
  if (view === "pool") {
    const evicted = new Set(state.effects.filter(effect => effect.kind === "evict").map(effect => effect.block));
    for (const effect of state.effects) {
      if (effect.group !== shownGroup || (effect.kind === "alloc" && evicted.has(effect.block))) continue;  // an eviction is more important than the allocation that caused it
      if (effect.kind !== "hostswap") device.flash(effect, now);
      else if (host.pool) host.flash({ ...effect, kind: "swap" }, now);
    }
  }
  state.effects.length = 0;
}
function drawPanels(state) {
  drawGauges(state);
  const config = state.config, pool = state.pools[shownGroup], hidden = pool.size - (device.count ?? pool.size);
  put($("mapsum"), `${fmt(pool.used)} owned · ${fmt(pool.kept)} reusable · ${fmt(pool.size - pool.used - pool.kept)} free`);
  $("unused").hidden = view !== "pool" || (!hidden && !device.showsUnused) || pool.high >= pool.size;
  $("unused").setAttribute("aria-pressed", device.showsUnused);
  put($("unused"), device.showsUnused ? "Hide unused" : `${fmt(hidden)} unused`);
  $("scale").hidden = device.per < 2;
  put($("scale").lastElementChild, `a tile is ${device.per} blocks`);
  if (config.num_host_blocks) put($("hostsum"), `${fmt(state.hosts[shownGroup].used)} of ${plural(config.hosts[shownGroup], "block")} hold swapped requests`);
  if (view === "pool") minimap.draw();
  drawRequests(state);
  drawDetails(state);
}

// ------------------------------------------------------------------------------------------------------ timeline

function follow(isFollowing) {
  playing = null;
  timeline.isFollowing = isFollowing;
  if (isFollowing && timeline.isFull) { timeline.clear(); ghost.state = null; reconnect(); }
  else if (isFollowing && timeline.end >= 0) timeline.seek(timeline.end);
  panelsDue = 0;
  wake();
}
/** Plays the records of the time that has passed. Long silences are shortened. */
function advance(now) {
  playing.wall += (now - playing.at) / 1000 * +$("speed").value;
  playing.at = now;
  while (timeline.cursor < timeline.end && timeline.items[timeline.cursor + 1].wall <= playing.wall) { timeline.step(null, true); if (timeline.items[timeline.cursor].isSnapshot) break; }
  if (timeline.cursor >= timeline.end) { playing = null; if (fileName === null) timeline.isFollowing = true; return; }
  const next = timeline.items[timeline.cursor + 1].wall;
  if (next - playing.wall > 2 * +$("speed").value) playing.wall = next - 0.5 * +$("speed").value;
}
function play() {
  if (playing) playing = null;
  else if (timeline.end >= 0) {
    if (timeline.cursor >= timeline.end) timeline.seek(0);
    timeline.isFollowing = false;
    playing = { wall: timeline.items[timeline.cursor].wall, at: performance.now() };
  }
  panelsDue = 0;
  wake();
}
function goTo(index) {
  playing = null; timeline.isFollowing = false;
  if (timeline.end >= 0) timeline.seek(index);
  panelsDue = 0; storyMark = "";
  wake();
}
function drawTimeline() {
  const scrub = $("scrub"), { cursor, end, items } = timeline;
  scrub.max = Math.max(0, end); scrub.value = Math.max(0, cursor);
  scrub.style.setProperty("--at", end > 0 ? 100 * cursor / end + "%" : cursor < 0 ? "0%" : "100%");
  for (const id of ["play", "back", "forth", "scrub", "export"]) $(id).disabled = end < 0;
  $("play").querySelector("path").setAttribute("d", playing ? "M3.5 2.5h3.2v11H3.5zM9.3 2.5h3.2v11H9.3z" : "M4.5 2.5v11l9-5.5z"); $("play").setAttribute("aria-label", playing ? "Stop playing" : "Play");
  const isPaused = !timeline.isFollowing;
  $("pause").hidden = fileName !== null || !isServed;
  put($("pause"), isPaused ? "Resume" : "Pause"); $("pause").setAttribute("aria-pressed", isPaused);
  $("live").hidden = fileName === null || !isServed;
  const shown = fileName !== null ? ["file", fileName] : isPaused && status[0] === "live" ? ["paused", playing ? "Replaying" : timeline.isFull ? "Paused: the recording is full" : "Paused"] : status;
  $("status").dataset.state = shown[0]; put($("status").lastElementChild, shown[1]);
  drawChapters();
  if (cursor < 0) { put($("when"), ""); return; }
  const behind = items[end].wall - items[cursor].wall;
  put($("when"), `${clock(items[cursor].wall)}${behind > 0.05 ? `  (${ago(behind)})` : ""}`);
  scrub.setAttribute("aria-valuetext", $("when").textContent);
}

// --------------------------------------------------------------------------------------------------------- files

function toast(text) { $("toast").textContent = text; $("toast").hidden = false; clearTimeout(toast.timer); toast.timer = setTimeout(() => { $("toast").hidden = true; }, 8000); }
function save() {
  if (timeline.end < 0) return;
  const address = URL.createObjectURL(new Blob([timeline.export()], { type: "application/json" })), anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = `quire-inspector-${new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-")}.json`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
async function load(file) {
  if (!file) return;
  try { openRecording(file.name, readRecording(await file.text())); }
  catch (error) { toast(`${file.name} cannot be shown: ${error.message}.`); }
}
function openRecording(name, opened) {
  link?.abort();
  Object.assign(timeline, opened);
  fileName = name; selection = null; hovered = null; playing = null; ghost.state = null; panelsDue = 0; storyMark = "";
  wake();
}
function backToLive() {
  fileName = null; selection = null; playing = null;
  timeline.clear(); ghost.state = null; status = ["waiting", "Connecting"];
  reconnect();
  wake();
}

// -------------------------------------------------------------------------------------------------------- search

/** Interprets a search: "block 120" or "120" is a block, "R42" or "R42.1" a request, other text a part of a request's id. */
function find(text) {
  const state = timeline.state, wanted = text.trim().toLowerCase();
  if (!wanted || !state) return null;
  const block = wanted.match(/^(?:block\s*|b|#)?([\d,]+)$/), request = wanted.match(/^(?:request|r)\s*(\d+)(?:\.(\d+))?$/);
  if (block) {
    const id = +block[1].replaceAll(",", ""), pool = state.pools[shownGroup];
    return id < pool.size ? { block: id, group: shownGroup, isHost: false } : `There is no block ${fmt(id)}: the pool has 0 to ${fmt(pool.size - 1)}`;
  }
  const all = [...state.requests.values()], exact = all.find(one => one.id.toLowerCase() === wanted);
  if (exact) return { key: exact.key };
  const found = request ? all.filter(one => one.family === +request[1] - 1 && (request[2] === undefined || one.sample === +request[2] - 1)) : all.filter(one => one.id.toLowerCase().includes(wanted));
  found.sort((a, b) => (a.state === "ended") - (b.state === "ended") || a.sample - b.sample);
  return found.length ? { key: found[0].key } : request ? `There is no request R${request[1]}${request[2] ? `.${request[2]}` : ""} at this moment` : `Nothing matches ${text.trim()}; try "block 120" or "R42"`;
}
function search() {
  const found = find($("find").value);
  if (found === null) return;
  if (typeof found === "string") { toast(found); return; }
  select(found);
  const table = found.key === undefined ? [] : timeline.state.requests.get(found.key).tables[shownGroup];
  if (found.block !== undefined) { setView("pool"); device.reveal(found.block); }
  else if (view === "pool" && table.length) device.reveal(table[0]);
}

// -------------------------------------------------------------------------------------------------------- wiring

$("pause").addEventListener("click", () => follow(!timeline.isFollowing));
$("live").addEventListener("click", backToLive);
$("export").addEventListener("click", save);
for (const id of ["open", "choose"]) $(id).addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { load($("file").files[0]); $("file").value = ""; });
$("play").addEventListener("click", play);
$("back").addEventListener("click", () => goTo(timeline.cursor - 1));
$("forth").addEventListener("click", () => goTo(timeline.cursor + 1));
$("scrub").addEventListener("input", () => goTo(+$("scrub").value));
$("close").addEventListener("click", () => select(null));
$("find").addEventListener("keydown", event => { if (event.key === "Enter") search(); else if (event.key === "Escape") $("find").blur(); });
$("order").addEventListener("change", () => { panelsDue = 0; wake(); });
VIEWS.forEach((name, i) => { $("v-" + name).addEventListener("click", () => setView(name)); tabKeys($("v-" + name), $("views"), i, at => setView(VIEWS[at])); });
const zoomView = factor => view === "time" ? gantt.zoomBy(factor) : device.zoomBy(factor);
$("in").addEventListener("click", () => zoomView(1.5));
$("out").addEventListener("click", () => zoomView(1 / 1.5));
$("fit").addEventListener("click", () => { device.zoom = 1; device.layout(); gantt.until = null; gantt.span = 20; gantt.version = ""; wake(); });
for (const [id, name] of [["follow", "follows"], ["arcs", "showsAllCopies"]]) {
  $(id).addEventListener("click", () => { device[name] = !device[name]; device.followDue = 0; $(id).setAttribute("aria-pressed", device[name]); refocus(); });
}
device.root.addEventListener("wheel", () => $("follow").setAttribute("aria-pressed", device.follows));
$("unused").addEventListener("click", () => { device.showsUnused = !device.showsUnused; device.zoom = 1; device.layout(); panelsDue = 0; wake(); });
for (const button of document.querySelectorAll("#panes button")) {
  button.addEventListener("click", () => {
    document.body.dataset.pane = button.dataset.pane;
    for (const other of document.querySelectorAll("#panes button")) other.setAttribute("aria-pressed", other === button);
    panelsDue = 0; drawGauges.theme = ""; wake();
  });
}
themeButton($("theme"));
for (const map of [device, host]) for (const name of ["scroll", "pointermove", "pointerleave"]) map.root.addEventListener(name, wake);
new ResizeObserver(() => { panelsDue = 0; drawGauges.theme = ""; wake(); }).observe(document.body);
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const isButton = event.target.matches("button, summary");
  const act = {
    " ": isButton ? null : () => fileName === null ? follow(!timeline.isFollowing) : play(), Escape: () => closeHelp() || select(null), e: save, o: () => $("file").click(),
    "+": () => $("in").click(), "=": () => $("in").click(), "-": () => $("out").click(), 0: () => $("fit").click(), "/": () => $("find").focus(),
    ArrowLeft: () => goTo(timeline.cursor - 1), ArrowRight: () => goTo(timeline.cursor + 1),
    1: () => setView("pool"), 2: () => setView("requests"), 3: () => setView("prefixes"), 4: () => setView("time"),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
addEventListener("dragover", event => { event.preventDefault(); document.body.classList.add("dropping"); });
addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
addEventListener("drop", event => { event.preventDefault(); document.body.classList.remove("dropping"); load(event.dataTransfer.files[0]); });
addEventListener("quire-theme", () => { readTheme(); wake(); });
function readTheme() {
  readPalette();
  for (const map of [device, host]) if (map.pool) map.layout();
  if (logical.state) logical.layout();
  gantt.version = tree.mark = "";
  $("d-story").replaceChildren(); $("d-owners").dataset.mark = ""; storyMark = "";
  panelsDue = 0;
}
readTheme();
reconnect();
wake();

/** An interface for tests and for debugging. */
window.inspector = {
  get state() { return timeline.state; }, timeline, device, host, logical, tree, gantt, frame, get selection() { return selection; }, get status() { return [...status]; },
  place(block, isHost = false) {
    const map = isHost ? host : device, [x, y] = map.centre(block), box = map.root.getBoundingClientRect();
    return [box.left + x / map.scale, box.top + y / map.scale];
  },
  colourAt(block) {
    const [x, y] = device.place(block), side = device.cell - device.gap;
    const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    copy.drawImage(device.canvas, -(x + (side >> 1)), -(y + side - Math.max(1, side >> 3) - (side > 8 ? 1 : 0)));
    return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
  },
  /** Draws all changes at once; resolves when they are visible. */
  drawn() { panelsDue = 0; wake(); return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); },
  ownerColour: key => ownerColour(key).rgb,
};
