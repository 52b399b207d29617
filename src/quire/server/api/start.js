"use strict";
// The chat page: it sends the entered text to the server's own routes, and shows how its tokens fill blocks.

const isChat = document.body.dataset.kind === "chat", model = document.body.dataset.model;
const MAX_CARDS = 400;           // blocks of one request that are shown
const IDEAS = isChat ? ["Write a function that reads a JSON file.", "Explain block tables."] : ["import os\nimport json\n\n\ndef read_config(path):\n", "class Stack:\n    def __init__(self):\n"];
let history = [];                // messages of a chat so far
let asking = null;               // the AbortController of the current answer
let books = null;                // the state of the cache, from the inspector's stream
let shown = null;                // {id, prompt: token texts, made: texts, cached}: the request whose blocks are shown
let watching = null;

const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}) });
async function fail(answer) {
  const found = await answer.json().catch(() => null), message = found?.error?.message || `the server answered ${answer.status}`;
  if (answer.status === 401) openOptions(true);
  throw new Error(answer.status === 401 ? `${message}. Enter the API key in the settings above.` : message);
}
/** Yields the data of each server-sent event of an answer. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const at = part.indexOf("data: ");
      if (at >= 0) yield part.slice(at + 6);
    }
  }
}

// ------------------------------------------------------------------------------------------------------ asking

async function ask(text) {
  const body = { model, stream: true, stream_options: { include_usage: true }, max_tokens: +$("most").value || 200 };
  if ($("temperature").value !== "") body.temperature = +$("temperature").value;
  const system = isChat && $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: text }];
  const what = isChat ? { messages } : { prompt: text };
  $("hello").hidden = true;
  say("user", text);
  const item = say("assistant", "");
  item.classList.add("open");
  asking = new AbortController();
  setBusy(true);
  let said = "", usage = null;
  const begun = performance.now();
  let first = 0;
  try {
    await watch();
    shown = { id: null, prompt: await tokensOf(what), made: [], cached: 0 };
    drawCards();
    const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", { method: "POST", headers: headers(), body: JSON.stringify({ ...body, ...what }), signal: asking.signal });
    if (!answer.ok) await fail(answer);
    for await (const data of eventsOf(answer)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      shown.id ||= chunk.id;
      const delta = isChat ? chunk.choices[0]?.delta?.content : chunk.choices[0]?.text;
      if (delta) { first ||= performance.now(); said += delta; shown.made.push(delta); item.firstChild.textContent = said; $("messages").scrollTop = $("messages").scrollHeight; }
      if (chunk.usage) usage = chunk.usage;
      redraw();
    }
  } catch (error) {
    if (error.name !== "AbortError") { item.classList.add("error"); item.firstChild.textContent = said + (said ? "\n" : "") + (error instanceof TypeError ? "The server does not answer." : `${error.message}`); }
  }
  item.classList.remove("open");
  if (said && isChat) history.push({ role: "user", content: text }, { role: "assistant", content: said });
  if (usage) {
    const found = usage.prompt_tokens_details?.cached_tokens || 0, spent = (performance.now() - first) / 1000, rate = usage.completion_tokens > 1 && spent > 0 ? `, ${((usage.completion_tokens - 1) / spent).toFixed(0)} tokens/s` : "";
    shown.cached = Math.max(shown.cached, found);
    item.append(make("small", { textContent: `${plural(usage.prompt_tokens, "prompt token")}, ${fmt(found)} of them found in the cache; ${fmt(usage.completion_tokens)} new; first one after ${duration((first - begun) / 1000)}${rate}` }));
    drawCards();
  }
  asking = null;
  setBusy(false);
  $("messages").scrollTop = $("messages").scrollHeight;
}
/** Returns the prompt's tokens as texts; empty if the server does not tokenize it. */
async function tokensOf(what) {
  const answer = await fetch("tokenize", { method: "POST", headers: headers(), body: JSON.stringify({ model, ...what, return_token_strs: true }), signal: asking.signal });
  if (answer.status === 401) await fail(answer);
  return answer.ok ? (await answer.json()).token_strs || [] : [];
}
function say(role, text) {
  const item = make("li", { className: role }, make("span", { textContent: text }));
  $("messages").append(item);
  $("messages").scrollTop = $("messages").scrollHeight;
  return item;
}
function setBusy(isBusy) { $("send").hidden = isBusy; $("stop").hidden = !isBusy; }

// ------------------------------------------------------------------------------------------------------ blocks

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
      if (parsed.kind === "snapshot") books = new State(parsed);
      else if (parsed.kind === "record" && books) books.apply(parsed, false);
      isReady();
      redraw();
    }
  })().catch(() => {}).finally(() => { watching = null; books = null; isReady(); });
  await ready;
}
function redraw() { if (!redraw.isDue) { redraw.isDue = true; requestAnimationFrame(() => { redraw.isDue = false; drawCards(); }); } }
const visible = text => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
function drawCards() {
  $("nothing").hidden = Boolean(shown);
  if (!shown) { $("cards").replaceChildren(); put($("sum"), "each card is a block"); return; }
  const own = shown.id && books ? [...books.requests.values()].find(one => one.id.startsWith(shown.id)) : null;
  const group = own ? Math.max(0, books.config.kinds.indexOf("attention")) : 0, size = books?.config.block_size || 16;
  if (own) {  // the table is copied, because it is still shown after the request's end
    shown.cached = Math.max(shown.cached, own.report?.cached || 0);
    Object.assign(shown, { label: books.label(own.key), colour: ownerColour(own.key).css });
    const { table, given } = own.tables[group].length ? { table: own.tables[group], given: own.given[group] } : own.left[group] || { table: [], given: 0 };
    if (table.length) Object.assign(shown, { table: [...table], given, refs: table.map(block => books.pools[group].refs[block]) });
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

// ------------------------------------------------------------------------------------------------------ wiring

function openOptions(isOpen) { $("options").hidden = !isOpen; $("settings").setAttribute("aria-expanded", isOpen); }
$("settings").addEventListener("click", () => openOptions($("options").hidden));
$("options").addEventListener("submit", event => event.preventDefault());
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = isChat ? $("prompt").value.trim() : $("prompt").value;
  if (!text || asking) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || (!isChat && !(event.ctrlKey || event.metaKey))) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => asking?.abort());
$("clear").addEventListener("click", () => { asking?.abort(); history = []; shown = null; $("messages").replaceChildren(); $("hello").hidden = false; drawCards(); $("prompt").focus(); });
try { $("key").value = sessionStorage.getItem("quire-key") || ""; } catch { /* the key must be entered again */ }
$("key").addEventListener("change", () => { try { sessionStorage.setItem("quire-key", $("key").value); } catch { /* the key is stored for this page only */ } });
$("key").placeholder = document.body.dataset.key ? "required by this server" : "not required";
if (!isChat) { put($("hello-title"), "Begin a text"); $("prompt").placeholder = "A text to continue (Ctrl+Enter sends)"; $("prompt").rows = 4; }
$("ideas").append(...IDEAS.map(text => { const button = make("button", { type: "button", textContent: text.trim().split("\n").join(" ⏎ ") }); button.addEventListener("click", () => { $("prompt").value = text; $("prompt").focus(); }); return button; }));
addEventListener("pagehide", () => watching?.abort());
addEventListener("quire-theme", () => { readPalette(); redraw(); });
readPalette();
themeButton($("theme"));
