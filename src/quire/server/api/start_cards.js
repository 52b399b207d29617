"use strict";
// The blocks of the last request: a card for each, with the texts of its tokens.

const MAX_CARDS = 400;           // blocks of one request that are shown
let cacheState = null;                // the state of the cache, from the inspector's stream
let shown = null;                // {id, prompt: token texts, made: texts, cached}: the request whose blocks are shown
let watching = null;

/** Starts to show a request. The prompt has the texts of its tokens. */
function showBlocks(prompt) { shown = { id: null, prompt, made: [], cached: 0 }; drawCards(); }
/** Adds new tokens. Their text belongs to the last one. Marks of reasoning have none, and a character's text is that of its last token. */
function addTokens(count, text) {
  for (let i = 1; i < count; i++) shown.made.push("");
  if (count) shown.made.push(text); else if (text) shown.made.push((shown.made.pop() ?? "") + text);
}
/** Follows the cache from the first message on. If that fails, blocks are shown without their ids. */
async function watch() {
  if (watching) return;
  watching = new AbortController();
  let isReady = () => {};
  const ready = new Promise(done => { isReady = done; setTimeout(done, 1500); });
  (async () => {
    const answer = await fetch("inspector/events", { headers: headers(), cache: "no-store", signal: watching.signal });
    if (!answer.ok) return;
    for await (const data of eventsOf(answer)) {
      const parsed = JSON.parse(data);
      if (parsed.kind === "snapshot") cacheState = new State(parsed);
      else if (parsed.kind === "record" && cacheState) cacheState.apply(parsed, false);
      isReady();
      redraw();
    }
  })().catch(() => {}).finally(() => { watching = null; cacheState = null; isReady(); });
  await ready;
}
/** Draws the cards, and the answer that grows, at the next frame. */
function redraw() {
  if (redraw.isDue) return;
  redraw.isDue = true;
  requestAnimationFrame(() => { redraw.isDue = false; drawCards(); if (asking) turns.at(-1)?.show(); });
}
const visible = text => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
function drawCards() {
  $("nothing").hidden = Boolean(shown);
  if (!shown) { $("cards").replaceChildren(); put($("sum"), "each card is a block"); return; }
  const own = shown.id && cacheState ? [...cacheState.requests.values()].find(one => one.id.startsWith(shown.id)) : null;
  const group = own ? Math.max(0, cacheState.config.kinds.indexOf("attention")) : 0, size = cacheState?.config.block_size || 16;
  if (own) {  // the table is copied, because it is still shown after the request's end
    shown.cached = Math.max(shown.cached, own.report?.cached || 0);
    Object.assign(shown, { label: cacheState.label(own.key), colour: ownerColour(own.key).css });
    const { table, given } = own.tables[group].length ? { table: own.tables[group], given: own.given[group] } : own.left[group] || { table: [], given: 0 };
    if (table.length) Object.assign(shown, { table: [...table], given, refs: table.map(block => cacheState.pools[group].refs[block]) });
  }
  const tokens = [...shown.prompt, ...shown.made], count = Math.min(MAX_CARDS, Math.max(Math.ceil(tokens.length / size), (shown.table?.length || 0) + (shown.given || 0))), list = $("cards");
  while (list.children.length > count) list.lastChild.remove();
  for (let i = 0; i < count; i++) {
    if (!list.children[i]) list.append(make("li", {}, make("div", { className: "name" }, make("b"), make("span")), make("div", { className: "tokens" }), make("div", { className: "level" }, make("i"))));
    const card = list.children[i], [name, texts, level] = card.children, block = shown.table?.[i - (shown.given || 0)], held = tokens.slice(i * size, (i + 1) * size);
    const isFound = (i + 1) * size <= shown.cached, refs = shown.refs?.[i - (shown.given || 0)];
    card.className = isFound ? "found" : "new";
    card.style.setProperty("--own", shown.colour || "");
    put(name.firstChild, block === undefined ? `tokens ${i * size}–${i * size + held.length - 1}` : `block ${fmt(block)}`);
    put(name.lastChild, isFound ? `found in the cache${own && refs > 1 ? `, ${refs} share it` : ""}` : own?.state === "running" && refs > 1 ? `${refs} share it` : `${held.length} of ${size}`);
    level.firstChild.style.width = `${100 * held.length / size}%`;
    while (texts.children.length > held.length) texts.lastChild.remove();
    held.forEach((text, j) => {
      if (!texts.children[j]) texts.append(make("span"));
      put(texts.children[j], visible(text));
      texts.children[j].className = i * size + j >= shown.prompt.length ? "made" : "";
    });
  }
  const parts = [shown.label, `${fmt(count)} block${count === 1 ? "" : "s"} of ${size} tokens`, shown.cached && `${fmt(shown.cached)} tokens found in the cache`, own && (own.state === "ended" ? "ended; full blocks stay reusable" : own.state)];
  put($("sum"), parts.filter(Boolean).join(" · "));
  if (asking) list.scrollTop = list.scrollHeight;
}
