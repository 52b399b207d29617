"use strict";
// The connection to the server, which sends events while the page is open.

function setStatus(state, text) { status = [state, text]; wake(); }
/** Reads the server's events while the page is open, and reconnects after an interruption. */
async function connect() {
  const mine = link = new AbortController();
  let pause = 500;
  while (!mine.signal.aborted) {
    let why = "Disconnected", dog;
    try {
      if (status[0] !== "lost") setStatus("waiting", "Connecting");
      const attempt = new AbortController(), stop = () => attempt.abort();
      mine.signal.addEventListener("abort", stop);
      dog = setInterval(() => { if (performance.now() - lastHeard > 40e3) stop(); }, 5000);
      lastHeard = performance.now();
      const answer = await fetch("inspector/events", { headers: { Accept: "text/event-stream" }, cache: "no-store", signal: attempt.signal });
      if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message || `The server answered ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || mine.signal.aborted) break;
        lastHeard = performance.now();
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const at = part.indexOf("data: ");
          if (at < 0) continue;
          pause = 500;
          heard(part.slice(at + 6));
        }
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      why = error instanceof TypeError || error.name === "AbortError" ? "Disconnected" : error.message;
    } finally { clearInterval(dog); }
    for (let left = pause; left > 0 && !mine.signal.aborted; left -= 250) {
      setStatus("lost", `${why}: again in ${Math.ceil(left / 1000)} s`);
      await new Promise(done => setTimeout(done, 250));
    }
    pause = Math.min(10e3, pause * 2);
  }
}
function heard(text) {
  const parsed = JSON.parse(text);
  if (parsed.error) throw new Error(parsed.error.message);  // the stream failed; connect() shows the error and reconnects
  if (status[0] !== "live") setStatus("live", "Live");
  timeline.add(text, parsed);
  heard.at = performance.now();
  wake();
}
function reconnect() { link?.abort(); if (isServed) connect(); else setStatus("waiting", "No recording"); }
/** While the engine is idle there are no records, so this makes the rates fall to zero. */
setInterval(() => {
  const state = timeline.state;
  if (state && status[0] === "live" && timeline.isFollowing && fileName === null && performance.now() - heard.at > 700) {
    state.sample(state.time + (performance.now() - heard.at) / 1000);
    panelsDue = 0;
    wake();
  }
}, 500);
