"use strict";
// The conversation: turns of a text, with images, and its answer, which are shown here and become messages for the model.

const turns = [];

/** A text and its answer. */
class Turn {
  constructor(text, pictures, limit) {
    Object.assign(this, { text, pictures, limit, reasoning: "", content: "", count: 0, usage: null, end: null, error: null, left: 0 });
    this.begun = this.first = this.thought = this.last = 0;  // times of the request, its first token, the end of its reasoning, and its last token
    const seen = pictures.map(({ name, url }) => make("img", { src: url, alt: name }));
    this.question = make("li", { className: "user" }, make("div", { className: "pictures", hidden: !seen.length }, ...seen), make("span", { textContent: text, hidden: !text }), this.tools(["Edit", () => this.edit()], copyButton(() => this.text)));
    this.item = make("li", { className: "assistant open" });
    $("messages").append(this.question, this.item);
    scrollDown();
  }
  /** Takes a part of the answer. */
  take(reasoning, content, count) {
    this.reasoning += reasoning; this.content += content; this.count += count;
    if (!reasoning && !content && !count) return;
    this.last = performance.now();
    this.first ||= this.last;
    if (content.trim()) this.thought ||= this.last;
  }
  /** True if the server refused the request. Such a turn is not sent with later ones. */
  get isRefused() { return this.end === "error" && !this.count; }
  messages() {
    const answer = { role: "assistant", content: this.content, ...(this.reasoning ? { reasoning_content: this.reasoning } : {}) };
    const parts = [...this.pictures.map(({ url }) => ({ type: "image_url", image_url: { url } })), ...(this.text ? [{ type: "text", text: this.text }] : [])];
    return [{ role: "user", content: this.pictures.length ? parts : this.text }, ...(this.end ? [answer] : [])];
  }
  /** Returns the reason why the answer ended where it does; empty: the model ended it. */
  reason() {
    const tokens = plural(this.count, "token");
    if (this.end === "length") return `cut at ${tokens}, ${this.limit && this.count >= this.limit ? "the limit in the settings" : "where the longest sequence of this model ends"}`;
    if (this.end === "stopped") return `stopped after ${tokens}`;
    if (this.end === "error") return this.isRefused ? this.error : `failed after ${tokens}: ${this.error}`;
    return this.end === "stop" ? "" : `ended by the server after ${tokens} (${this.end})`;
  }
  notice() {
    const isEmpty = !this.content.trim() && !this.isRefused;
    const parts = [
      isEmpty && (this.reasoning.trim() ? "there is no answer, only reasoning" : "the answer is empty"),
      this.reason(),
      this.left && `without the first ${this.left > 1 ? `${this.left} turns` : "turn"}, for which the model has no room`,
      this.isRefused && "this turn is not sent with the next one",
    ];
    return parts.filter(Boolean).map(part => part[0].toUpperCase() + part.slice(1).replace(/\.?$/, ".")).join(" ");
  }
  numbers() {
    const { usage, count } = this, seconds = (this.last - this.first) / 1000, thinking = usage?.completion_tokens_details?.reasoning_tokens;
    return [
      this.end === "stop" && "ended by the model",
      usage && `${plural(usage.prompt_tokens, "prompt token")}, ${fmt(usage.prompt_tokens_details?.cached_tokens || 0)} of them found in the cache`,
      `${fmt(count)} new${thinking ? `, ${fmt(thinking)} of them reasoning` : ""}`,
      this.first && `first one after ${duration((this.first - this.begun) / 1000)}`,
      count > 1 && seconds > 0 && `${((count - 1) / seconds).toFixed(0)} tokens/s`,
    ].filter(Boolean).join(" · ");
  }

  // ---------------------------------------------------------------------------------------------------- showing

  show() {
    const isFollowed = isAtEnd();
    if (this.reasoning.trim()) this.showReasoning();
    if (this.content.trim()) this.showContent();
    if (isFollowed) scrollDown();
  }
  showReasoning() {
    if (!this.thinking) {
      this.thinking = make("details", { className: "thinking", open: true }, make("summary"), make("div"));
      this.item.prepend(this.thinking);
    }
    const [summary, text] = this.thinking.children;
    put(text, this.reasoning.trim());
    if (this.thought && !this.isFolded) { this.thinking.open = false; this.isFolded = true; }
    const until = this.thought || (this.end && this.last);
    put(summary, until ? `Thought for ${duration((until - this.first) / 1000)}${this.thought ? "" : ", without an end"}` : "Thinking…");
  }
  showContent() {
    if (!this.answer) {
      const node = make("div", { className: isChat ? "answer" : "answer plain" });
      this.item.append(node);
      this.answer = isChat ? new Markdown(node) : { show: text => put(node, text) };
    }
    this.answer.show(isEmbedded && isChat ? PYTHON + this.content.replace(/^\n+/, "") : this.content);
  }
  /** Shows the end of the answer: the reason, its numbers, and its buttons. */
  finish() {
    this.show();
    this.item.classList.remove("open");
    const isFollowed = isAtEnd(), notice = this.notice();
    if (notice) this.item.append(make("p", { className: this.end === "error" ? "notice error" : "notice", textContent: notice }));
    const again = ["Regenerate", () => repeat(this, this.text)];
    const tools = this.content.trim() ? [copyButton(() => this.content.trim()), again] : [again];
    this.item.append(this.tools(...(this.isRefused ? [] : [make("small", { textContent: this.numbers() })]), ...tools));
    if (isFollowed) scrollDown();
  }
  tools(...found) {
    return make("div", { className: "tools" }, ...found.map(one => {
      if (!Array.isArray(one)) return one;
      const button = make("button", { type: "button", className: "act", textContent: one[0] });
      button.addEventListener("click", one[1]);
      return button;
    }));
  }
  /** Lets the user edit the text in its place. Sending it replaces this turn. */
  edit() {
    const before = [...this.question.children], rows = Math.min(12, this.text.split("\n").length + 1);
    const field = make("textarea", { value: this.text, rows, attributes: { "aria-label": "Edited message" } });
    const close = () => this.question.replaceChildren(...before);
    const send = () => { if (field.value.trim() || this.pictures.length) repeat(this, isChat ? field.value.trim() : field.value); };
    field.addEventListener("keydown", event => {
      if (event.key === "Escape") close();
      if (!isSending(event)) return;
      event.preventDefault();
      send();
    });
    this.question.replaceChildren(field, this.tools(["Send", send], ["Cancel", close]));
    field.focus();
  }
}
const PYTHON = "`````python\n";  // before answers of the embedded model, which are code without a fence
/** Replaces a turn, and forgets those after it. */
function repeat(turn, text) {
  if (asking) return;
  for (const one of turns.splice(turns.indexOf(turn))) { one.question.remove(); one.item.remove(); }
  ask(text, turn.pictures);
}
function isAtEnd() { const { scrollHeight, scrollTop, clientHeight } = $("messages"); return scrollHeight - scrollTop - clientHeight < 60; }
function scrollDown() { $("messages").scrollTop = $("messages").scrollHeight; }
