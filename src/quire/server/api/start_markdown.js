"use strict";
// Answers as markdown. marked makes HTML of it, and DOMPurify removes all of that which is not listed here.

const CLEAN = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const escaped = text => text.replace(/[&<>"]/g, found => `&#${found.charCodeAt(0)};`);
marked.use({
  gfm: true, breaks: true,
  renderer: {
    html: ({ text }) => /^<br\s*\/?>$/i.test(text.trim()) ? text : escaped(text),  // shown as written
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,  // the page loads nothing
  },
});

/** Shows a growing text as markdown. Only blocks that have changed are made, so that a selection survives. */
class Markdown {
  constructor(node) { this.node = node; this.sources = []; }
  show(text) {
    const tokens = marked.lexer(text).filter(token => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (same < tokens.length && tokens[same].raw === this.sources[same]) same++;
    while (this.node.children.length > same) this.node.lastChild.remove();
    this.node.append(...tokens.slice(same).map(token => make("div", {}, blockOf(token))));
    this.sources = tokens.map(token => token.raw);
  }
}
function blockOf(token) {
  const block = DOMPurify.sanitize(marked.parser([token]), CLEAN);
  for (const link of block.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of block.querySelectorAll("table")) enclose(table, make("div", { className: "scroll" }));
  for (const code of block.querySelectorAll("pre")) {
    const language = code.firstElementChild?.className.replace("language-", "") || "text";
    enclose(code, make("div", { className: "code" }, make("div", { className: "bar" }, make("span", { textContent: language }), copyButton(() => code.textContent))));
  }
  return block;
}
function enclose(node, outer) { node.replaceWith(outer); outer.append(node); }

/** Returns a button that copies a text. Without a secure context, as on another machine over http, only the older way works. */
function copyButton(textOf) {
  const button = make("button", { type: "button", textContent: "Copy" });
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(textOf()); } catch {
      const field = make("textarea", { className: "sr", value: textOf() });
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    put(button, "Copied");
    setTimeout(() => put(button, "Copy"), 1500);
  });
  return button;
}
