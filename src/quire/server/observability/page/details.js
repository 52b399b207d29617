"use strict";
// The panel at the bottom right: the selected request or block, else the latest events.

const tableRows = new Rows($("table"), 21, () => {
  const row = makeRow(["num", "num", "num muted", "num muted"]);
  row.addEventListener("click", () => select({ block: +row.dataset.block, group: shownGroup, isHost: row.dataset.host === "1" }));
  return row;
}, (row, { index, block, tokens, owners, isHost }) => {
  row.dataset.block = block; row.dataset.host = isHost ? "1" : "0";
  put(row.children[0], String(index)); put(row.children[1], String(block)); put(row.children[2], String(tokens)); put(row.children[3], fmt(owners)); row.dataset.shared = owners > 1;
  row.title = `Tokens of logical block ${index}: ${tokens}, in ${isHost ? "host " : ""}block ${block}${owners > 1 ? `, shared by ${owners}` : ""}`;
});

function drawDetails(state) {
  const request = selection?.key !== undefined ? state.requests.get(selection.key) : null, isBlock = selection?.block !== undefined;
  $("close").hidden = !selection;
  const isSplit = request && sumOf(request.tables) + sumOf(request.hosts) > 0;
  $("d-swatch").hidden = !request; $("d-left").hidden = !isSplit; $("d-why").hidden = true; $("d-owners").hidden = true; $("d-badge").hidden = true;
  $("d-split").style.gridTemplateColumns = isSplit ? "" : "minmax(0, 1fr)";
  $("d-storyname").hidden = !selection; $("d-facts").hidden = !request && !isBlock; $("d-story").hidden = !selection; $("d-steps").hidden = Boolean(selection);
  $("d-split").hidden = false;
  if (request) { drawFacts(factsOfRequest(state, request)); drawStory(state, event => describeRequestEvent(event, state, request.key)); }
  else if (isBlock) { drawFacts(factsOfBlock(state)); drawStory(state, event => describeBlockEvent(event, state, selection)); }
  else if (selection) { selection = null; storyMark = ""; panelsDue = 0; wake(); }  // the request is no longer known
  else { put($("d-title"), "Latest events"); $("d-title").title = ""; drawSteps(state); }
}
function badge(text) { $("d-badge").hidden = false; put($("d-badge"), text); }

function factsOfRequest(state, request) {
  const isHost = request.state === "swapped", size = state.config.spans[shownGroup], why = $("d-why");
  const table = (isHost ? request.hosts : request.tables)[shownGroup], given = request.given[shownGroup], books = (isHost ? state.hosts : state.pools)[shownGroup];
  $("d-swatch").style.setProperty("--own", ownerColour(request.key).css);
  put($("d-title"), `${state.label(request.key)} · ${shortName(request.id)}`); $("d-title").title = request.id;
  badge(request.state === "ended" ? `ended: ${request.reason}` : request.state);
  if (request.report) { why.hidden = false; why.className = request.report.miss ? "why miss" : "why"; put(why, request.report.text); }
  tableRows.show(table.map((block, i) => ({ index: i + given, block, isHost, owners: books.refs[block], tokens: Math.max(0, Math.min(size, request.stored - (i + given) * size)) })));
  put($("d-where"), isHost ? "host block" : "block");
  const waited = queuedFor(request, state.time), speed = speedOf(request, state.time);
  return [
    ["Prompt", fmt(request.prompt), "", "prompt"], ["Generated", fmt(request.generated), ` of ${fmt(request.limit - request.prompt)}`, "generated"],
    ["Blocks", fmt(table.length), sumOf(request.tables) ? ` · ${fmt(table.filter(block => books.refs[block] > 1).length)} shared` : "", "table"],
    ["Queued", waited === null ? "–" : waited < 0.0005 ? "0" : duration(waited), "", "queued"],
    ["First token", request.spoke !== null && request.arrived !== null ? `${(request.spoke - request.arrived).toFixed(2)} s` : "–", "", "first"],
    ["Speed", speed ? speed.toFixed(speed < 10 ? 1 : 0) : "–", speed ? " tokens/s" : "", "speed"],
    ...(request.drafted ? [["Drafts", fmt(request.drafted), ` · ${fmt(request.accepted)} accepted, ${fmt(request.drafted - request.accepted)} rejected`, "drafts"]] : []),
  ];
}
function factsOfBlock(state) {
  const { block, group, isHost } = selection, books = (isHost ? state.hosts : state.pools)[group], owners = state.ownersOf(isHost, group, block);
  put($("d-title"), `${isHost ? "Host block" : "Block"} ${fmt(block)}`); $("d-title").title = "";
  badge(books.refs[block] > 1 ? `shared by ${books.refs[block]}` : books.refs[block] ? "owned" : books.cached[block] ? "free, reusable" : "free");
  const mark = owners.map(({ request, index }) => `${request.key}:${index}`).join();
  if ($("d-owners").dataset.mark !== `${block}/${mark}`) {
    $("d-owners").dataset.mark = `${block}/${mark}`;
    $("d-owners").replaceChildren(...owners.slice(0, 64).map(({ request, index }) => requestChip(request.key, state, ` [${index}]`)), owners.length > 64 ? ` and ${owners.length - 64} more` : "");
  }
  $("d-owners").hidden = !owners.length;
  return [
    ["Owners", fmt(books.refs[block]), "", "owners"], ["Tokens", books.refs[block] || books.cached[block] ? fmt(books.fill[block]) : "–", ` of ${books.blockSize}`, "filled"],
    ["Reusable", isHost ? "–" : books.cached[block] ? "yes" : "no", "", "reusable"],
  ];
}
function drawFacts(facts) {
  const list = $("d-facts"), mark = facts.map(([name]) => name).join();
  if (list.dataset.mark !== mark) {
    list.dataset.mark = mark;
    list.replaceChildren(...facts.map(([name, , , topic]) => make("div", {}, make("dt", {}, name, helpButton(topic, name)), make("dd", {}, make("span"), make("small")))));
  }
  facts.forEach(([, value, more], i) => { const [main, small] = list.children[i].lastElementChild.children; put(main, value); put(small, more); });
}

/** Draws the story of the selection: the latest moment first, and within a moment the cause above its effect. */
function drawStory(state, tell) {
  const mark = `${state.number}/${state.log.length}/${state.epoch}`, list = $("d-story");
  if (mark !== storyMark) {
    storyMark = mark;
    const told = [];
    let at = null, place = 0;
    for (let i = state.log.length - 1; i >= 0 && told.length < 200; i--) {
      const parts = tell(state.log[i]);
      if (!parts) continue;
      if (state.log[i][1] !== at) { at = state.log[i][1]; place = told.length; }
      told.splice(place, 0, [at, parts]);
    }
    if (!told.length) told.push([null, ["No event has concerned it yet."]]);
    keepOrMake(list, told, ([at, parts]) => at + JSON.stringify(parts), ([at, parts]) => make("li", { data: { at: at ?? "" } }, make("time"), make("span", {}, ...nodes(parts, state))));
  }
  drawTimes(list, state);
}
/** Draws the latest events, one line per step. A line opens to the step's events, in their order. */
function drawSteps(state) {
  const mark = `${state.number}/${state.log.length}/${state.epoch}`, list = $("d-steps");
  if (mark !== storyMark) {
    storyMark = mark;
    const folded = foldSteps(state, 60).map(step => ({ step, said: describeStep(step, state) }));
    keepOrMake(list, folded, ({ step, said }) => `${step.step?.[2] ?? ""}/${said.join()}`, ({ step, said: [name, text] }) => {
      const at = step.step?.[1] ?? step.events[step.events.length - 1][1], head = [make("time"), make("span", {}, make("b", { textContent: `${name} ` }), text)];
      const events = step.events.map(event => describeEvent(event, state)).filter(Boolean);
      if (!events.length) return make("li", { data: { at } }, make("div", { className: "quiet" }, ...head));
      const inner = make("ol"), fold = make("details", {}, make("summary", {}, ...head), inner);
      fold.addEventListener("toggle", () => { if (fold.open && !inner.children.length) inner.replaceChildren(...events.map(parts => make("li", {}, ...nodes(parts, state)))); });
      return make("li", { data: { at } }, fold);
    });
    if (!folded.length) list.replaceChildren(make("li", { className: "muted", textContent: "Nothing has happened yet." }));
  }
  drawTimes(list, state);
}
/** Keeps items that are already in the list, so that they stay open, and in place while they are clicked. */
function keepOrMake(list, items, name, make) {
  const known = new Map([...list.children].map(item => [item.dataset.mark, item])), seen = new Map();
  const made = items.map(item => {
    const base = name(item), nth = seen.get(base) || 0, mark = `${base}#${nth}`;
    seen.set(base, nth + 1);
    const found = known.get(mark) || make(item);
    found.dataset.mark = mark;
    return found;
  });
  if (made.length !== list.children.length || made.some((item, i) => item !== list.children[i])) list.replaceChildren(...made);
}
function drawTimes(list, state) {
  for (const item of list.children) {
    if (!item.dataset.at) continue;
    const time = item.querySelector("time");
    put(time, ago(state.time - item.dataset.at));
    time.title ||= clock(state.epoch + +item.dataset.at);
  }
}
