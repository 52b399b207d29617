"use strict";
// The server's routes: it tokenizes a prompt and streams the answer.

const LEAST_ROOM = 256;          // tokens that an answer should have room for, or a quarter of the longest sequence
const CLEARED = "cleared";       // the reason of an abort that forgets the conversation
let asking = null;               // the AbortController of the current answer

const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}) });
const post = (path, body) => fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: asking.signal });
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
/** Asks the model for the next answer, and shows it as it grows. */
async function ask(text, pictures) {
  const limit = +$("most").value || null, turn = new Turn(text, pictures, limit), mine = asking = new AbortController();
  turns.push(turn);
  $("hello").hidden = true;
  setBusy(true);
  try {
    await watch();
    const prompt = await fitting(turn);
    const body = { model: $("model").value, ...prompt, max_tokens: limit, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    if ($("temperature").value !== "") body.temperature = +$("temperature").value;
    turn.begun = performance.now();
    const answer = await post(isChat ? "v1/chat/completions" : "v1/completions", body);
    if (!answer.ok) await fail(answer);
    for await (const data of eventsOf(answer)) {
      if (data === "[DONE]") break;
      read(turn, JSON.parse(data));
    }
    if (!turn.end) throw new Error("the connection was lost");
  } catch (error) {
    turn.end = error.name === "AbortError" ? "stopped" : "error";
    turn.error = error instanceof TypeError ? `the server does not answer (${error.message})` : error.message;
  }
  asking = null;
  setBusy(false);
  if (mine.signal.reason === CLEARED) return;
  turn.finish();
  redraw();
}
/** Takes a chunk of the stream. */
function read(turn, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  shown.id ||= chunk.id;
  const choice = chunk.choices[0], delta = choice?.delta || {};
  if (choice) {
    const reasoning = delta.reasoning_content || delta.reasoning || "", content = delta.content || choice.text || "";
    if (choice.prompt_token_ids && !shown.prompt.length) shown.prompt = choice.prompt_token_ids.map(() => "");
    turn.take(reasoning, content, choice.token_ids?.length || 0);
    addTokens(choice.token_ids?.length || 0, reasoning + content);
    turn.end ||= choice.finish_reason;
  }
  if (chunk.usage) {
    turn.usage = chunk.usage;
    shown.cached = Math.max(shown.cached, chunk.usage.prompt_tokens_details?.cached_tokens || 0);
  }
  redraw();
}
/** Returns the prompt: the conversation, without its first turns if the model has no room for all. Shows its tokens. */
async function fitting(turn) {
  const system = isChat && $("system").value.trim(), earlier = isChat ? turns.slice(0, -1).filter(one => !one.isRefused) : [];
  for (;; turn.left++) {
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...[...earlier.slice(turn.left), turn].flatMap(one => one.messages())];
    const prompt = isChat ? { messages } : { prompt: turn.text };
    const answer = await post("tokenize", { model: $("model").value, ...prompt, return_token_strs: true });
    if (answer.status === 401) await fail(answer);
    const { count = 0, max_model_len: longest = 0, token_strs: texts = [] } = answer.ok ? await answer.json() : {};
    if (turn.left < earlier.length && count + Math.min(turn.limit || LEAST_ROOM, longest / 4) > longest) continue;
    showBlocks(texts);
    return prompt;
  }
}
/** Lists the models, with adapters, if there are several. */
async function listModels() {
  const answer = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (!answer?.ok) return;  // without a key; it is listed when there is one
  const { data } = await answer.json(), chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id, parent }) => make("option", { value: id, textContent: parent ? `${id} (adapter of ${parent})` : id })));
  $("model").value = data.some(one => one.id === chosen) ? chosen : data[0].id;
  $("model").hidden = data.length < 2;
  $("name").hidden = !$("model").hidden;
}
