"use strict";
// The prefix cache as a tree: trunks are prefixes that sequences have in common, the wider the more users they have.

const MAX_LEAVES = 160;
const LEAF = 24;                 // css pixels from one leaf to the next
const SVG = "http://www.w3.org/2000/svg";
const LOST_FOR = 20;             // seconds for which an evicted block is drawn, dashed

/** Returns the cached blocks of a pool as segments: runs of blocks without a branch, with the same number of users. */
function prefixTree(state, group) {
  const pool = state.pools[group], kids = new Map(), roots = [];
  for (let block = 0; block < pool.high; block++) {
    if (!pool.cached[block]) continue;
    const before = pool.blockBefore(block);
    if (before < 0) roots.push(block);
    else if (kids.has(before)) kids.get(before).push(block);
    else kids.set(before, [block]);
  }
  const segments = [];
  const grow = first => {
    const segment = { blocks: [first], users: pool.refs[first], kids: [], ends: [], lost: 0, total: 0, most: 0, depth: 0 };
    let block = first;
    for (let next; (next = kids.get(block)) && next.length === 1 && pool.refs[next[0]] === segment.users; block = next[0]) segment.blocks.push(next[0]);
    segments.push(segment);
    return segment;
  };
  const tops = roots.map(grow), segmentOf = new Map();
  for (let i = 0; i < segments.length; i++) {  // parents before their children, without recursion
    const segment = segments[i];
    for (const block of segment.blocks) segmentOf.set(block, segment);
    segment.kids = (kids.get(segment.blocks[segment.blocks.length - 1]) || []).map(grow);
    for (const kid of segment.kids) { kid.parent = segment; kid.depth = segment.depth + segment.blocks.length; }
  }
  for (const request of state.requests.values()) {  // a sequence continues from its last cached block
    const table = request.tables[group];
    if (!table.length) continue;
    let last = -1;
    for (const block of table) { if (!pool.cached[block]) break; last = block; }
    const segment = segmentOf.get(last), rest = table.length - table.indexOf(last) - 1;
    if (segment) segment.ends.push({ request, rest });
    else tops.push({ blocks: [], users: 1, kids: [], ends: [{ request, rest: table.length }], lost: 0, total: 0, most: 1, depth: 0 });
  }
  for (const { before, at } of pool.lost) if (state.time - at < LOST_FOR && segmentOf.has(before)) segmentOf.get(before).lost++;
  for (let i = segments.length - 1; i >= 0; i--) {
    const segment = segments[i];
    segment.total += segment.blocks.length; segment.most = Math.max(segment.most, segment.users);
    if (segment.parent) { segment.parent.total += segment.total; segment.parent.most = Math.max(segment.parent.most, segment.most); }
  }
  const byUse = (a, b) => b.most - a.most || b.total - a.total || (a.blocks[0] ?? 0) - (b.blocks[0] ?? 0);
  tops.sort(byUse);
  for (const segment of segments) segment.kids.sort(byUse);
  return { tops, segments, cached: segmentOf.size, saved: [...segmentOf].reduce((sum, [block]) => sum + Math.max(0, pool.refs[block] - 1), 0) };
}

class TreeView {
  constructor(root) {
    this.root = root; this.state = null; this.group = 0; this.mark = ""; this.due = 0;
    this.svg = root.appendChild(document.createElementNS(SVG, "svg"));
    this.note = root.appendChild(make("p", { className: "empty", hidden: true }));
    root.addEventListener("pointerleave", () => { hideTip(this); setHovered(null); });
    new ResizeObserver(() => { this.mark = ""; this.due = 0; wake(); }).observe(root);
  }
  show(state, group) { this.state = state; this.group = group; this.mark = ""; this.due = 0; }
  showTip() { if (this.hover) showTip(this, ...this.hover); }
  draw(now) {
    const { state, group } = this, wide = this.root.clientWidth - 14;
    if (!state || wide < 60) return;
    const pool = state.pools[group], mark = `${state.epoch}/${pool.version}/${selection?.key}/${hovered}/${palette.panel}/${wide}/${Math.floor(state.time / 5)}`;
    if (mark === this.mark) return;
    if (now < this.due) { setTimeout(wake, this.due - now + 5); return; }
    this.mark = mark; this.due = now + 400;
    const isAttention = state.config.kinds[group] === "attention";
    const tree = isAttention && state.config.prefix_caching ? prefixTree(state, group) : null;
    this.note.hidden = Boolean(tree?.tops.length); this.svg.style.display = tree?.tops.length ? "" : "none";
    put(this.note, !state.config.prefix_caching ? "The prefix cache is off, so nothing is kept for later requests." : !isAttention ? "States and rows belong to the end of a prefix and form no tree. Choose an attention group above." : "Nothing is cached yet. Each full block of a prompt will appear here, and prompts that begin alike will grow from one trunk.");
    this.tree = tree;
    if (tree?.tops.length) this.build(tree, wide, pool);
  }
  build(tree, wide, pool) {
    const size = pool.blockSize, parts = [], state = this.state, left = 10;
    const deepest = Math.max(1, ...tree.segments.map(one => one.depth + one.blocks.length + Math.max(0, ...one.ends.map(end => end.rest))), ...tree.tops.flatMap(top => top.ends.map(end => end.rest)));
    const step = Math.max(1, Math.min(42, (wide - left - 190) / deepest));
    let y = 18, leaves = 0, left_out = 0;
    const thick = users => Math.min(26, 4 + 4.5 * Math.sqrt(users));
    const place = segment => {
      segment.x = left + segment.depth * step; segment.end = segment.x + Math.max(3, segment.blocks.length * step);
      const unused = segment.kids.filter(kid => !kid.most), shown = segment.kids.filter(kid => kid.most).concat(unused.length > 4 ? unused.slice(0, 3) : unused);
      segment.hidden = unused.length > 4 ? unused.length - 3 : 0;
      segment.shown = leaves < MAX_LEAVES ? shown : [];
      segment.hidden += segment.kids.length - segment.shown.length - segment.hidden;
      const rows = [...segment.ends.map(end => ({ end })), ...segment.shown.map(kid => ({ kid })), ...(segment.hidden ? [{ more: segment.hidden }] : []), ...(segment.lost ? [{ lost: segment.lost }] : [])];
      return rows;
    };
    // A stack instead of recursion: the depth of a conversation grows with its number of turns.
    const stack = [], visit = segment => { stack.push({ segment, rows: place(segment), at: 0, first: null, last: null }); };
    const tops = tree.tops.slice(0, MAX_LEAVES);
    left_out = tree.tops.length - tops.length;
    for (const top of tops) {
      visit(top);
      let done = null;
      while (stack.length) {
        const here = stack[stack.length - 1];
        if (done) { here.rows[here.at++].y = done.y; done = null; }
        if (here.at < here.rows.length) {
          const row = here.rows[here.at];
          if (row.kid) { visit(row.kid); continue; }
          row.y = y; y += LEAF; leaves++; here.at++;
          continue;
        }
        if (!here.rows.length) { here.segment.y = y; y += LEAF; leaves++; }
        else here.segment.y = here.rows[0].y;   // the first row continues in a straight line
        here.segment.rows = here.rows;
        stack.pop();
        done = here.segment;
      }
      y += 6;
    }
    const node = (name, attributes, parent) => {
      const made = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      (parent || this.svg).append(made);
      return made;
    };
    const focusedLabel = document.activeElement?.closest?.("#tree g")?.dataset.mark;
    this.svg.replaceChildren();
    const high = y + 8;
    this.svg.setAttribute("width", wide); this.svg.setAttribute("height", high); this.svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    const focus = state.requests.get(focusKey()), mine = new Set(focus?.tables[this.group] || []);
    const colourOf = segment => {
      if (focus && segment.blocks.some(block => mine.has(block))) return ownerColour(focus.key).css;
      return segment.users > 1 ? palette.shared : segment.users === 1 ? ownerColour(pool.sums[segment.blocks[0]]).css : palette.hatch;
    };
    const curve = (x, from, to, end) => `M${x} ${from} C${x + 14} ${from} ${x + 4} ${to} ${x + 18} ${to} L${end} ${to}`;
    const tell = (group, title, text, wanted, key) => {
      group.setAttribute("tabindex", "0"); group.setAttribute("role", "button"); group.setAttribute("aria-label", `${title}: ${text}`);
      group.dataset.mark = title;
      const go = () => select(wanted);
      group.addEventListener("click", go);
      group.addEventListener("keydown", event => { if (event.key === "Enter") go(); });
      group.addEventListener("pointermove", event => { this.hover = [title, text, event.clientX, event.clientY]; this.showTip(); });
      group.addEventListener("pointerenter", () => { if (key !== undefined) setHovered(key); });
      group.addEventListener("pointerleave", () => { this.hover = null; hideTip(this); if (key !== undefined) setHovered(null); });
      if (group.dataset.mark === focusedLabel) queueMicrotask(() => group.focus({ preventScroll: true }));
    };
    const drawSegment = segment => {
      if (!segment.blocks.length) return;
      const group = node("g", { class: "segment", "data-users": segment.users, "data-block": segment.blocks[0] });
      const tokens = segment.blocks.length * size, from = segment.depth * size;
      node("rect", { x: segment.x, y: segment.y - thick(segment.users) / 2, width: segment.end - segment.x, height: thick(segment.users), rx: Math.min(4, thick(segment.users) / 2), fill: colourOf(segment), opacity: focus && !segment.blocks.some(block => mine.has(block)) ? 0.35 : segment.users ? 1 : 0.75 }, group);
      const label = `${fmt(tokens)}${segment.users > 1 ? ` × ${segment.users}` : ""}`;
      if (segment.end - segment.x > 8 * label.length && thick(segment.users) >= 13) node("text", { x: segment.x + 6, y: segment.y + 4, class: segment.users > 1 && !focus ? "on" : "ink", fill: segment.users > 1 ? palette["on-shared"] : "#14181d" }, group).textContent = label;
      tell(group, segment.users ? plural(segment.users, "request") + (segment.users === 1 ? " uses" : " share") + ` ${fmt(tokens)} tokens` : `${fmt(tokens)} tokens that no request uses now`,
        `tokens ${fmt(from)} to ${fmt(from + tokens - 1)} of ${segment.depth ? "sequences that continue here" : "sequences that begin here"}, in ${plural(segment.blocks.length, "block")} from ${segment.blocks[0]} on`, { block: segment.blocks[0], group: this.group, isHost: false });
    };
    const links = node("g", { fill: "none", "stroke-linecap": "round" }), draw = [...tops];
    while (draw.length) {
      const segment = draw.pop();
      for (const row of segment.rows) {
        const isStraight = row.y === segment.y, from = segment.end ?? left, to = isStraight ? from : from + 20;
        if (row.kid) {
          row.kid.x = Math.max(row.kid.x, isStraight ? from : to - 4); row.kid.end = Math.max(row.kid.end, row.kid.x + 3);
          if (!isStraight) node("path", { d: curve(from, segment.y, row.y, row.kid.x + 1), stroke: colourOf(row.kid), "stroke-width": Math.min(6, thick(row.kid.users) / 2), opacity: 0.8 }, links);
          draw.push(row.kid);
        } else if (row.end) this.drawEnd(row, segment, { node, links, curve, tell, from, isStraight, step, focus });
        else if (row.more) {
          node("path", { d: curve(from, segment.y, row.y, to), stroke: palette.hatch, "stroke-width": 1.5 }, links);
          node("text", { x: to + 6, y: row.y + 4, class: "note" }).textContent = `${row.more} more ${row.more === 1 ? "branch" : "branches"}`;
        } else {
          node("path", { d: curve(from, segment.y, row.y, to + 30), stroke: palette.bad, "stroke-width": 2, "stroke-dasharray": "3 4", class: "lost" }, links);
          node("text", { x: to + 37, y: row.y + 4, class: "note" }).textContent = `${plural(row.lost, "block")} evicted lately`;
        }
      }
      drawSegment(segment);
    }
    if (left_out) node("text", { x: left, y: high - 2, class: "note" }).textContent = `and ${fmt(left_out)} more beginnings that fewer use`;
    this.svg.setAttribute("role", "group");
    this.svg.setAttribute("aria-label", `Prefix tree: ${plural(tree.cached, "cached block")} in ${plural(tree.tops.length, "trunk")}`);
  }
  /** Draws a request's end: its blocks after the cached ones, its name, and where its prompt differs from the cache. */
  drawEnd({ end: { request, rest }, y }, segment, { node, links, curve, tell, from, isStraight, step, focus }) {
    const colour = ownerColour(request.key).css, begin = segment.blocks.length ? (isStraight ? from : from + 20) : from, tail = begin + Math.max(4, rest * step);
    const isFaded = focus && focus !== request, label = this.state.label(request.key);
    if (!isStraight) node("path", { d: curve(from, segment.y, y, begin), stroke: colour, "stroke-width": 2.5, opacity: isFaded ? 0.3 : 0.9 }, links);
    const group = node("g", { class: "end", "data-key": request.key });
    if (rest) node("rect", { x: begin, y: y - 3, width: tail - begin, height: 6, rx: 3, fill: colour, opacity: isFaded ? 0.25 : 0.65 }, group);
    const name = node("text", { x: (rest ? tail : begin) + 7, y: y + 4, class: "name", opacity: isFaded ? 0.5 : 1 }, group);
    name.textContent = label;
    const report = request.report, differs = report?.differs;
    const note = differs !== undefined && differs !== null ? `differs from token ${fmt(differs)}` : ["evicted", "expired", "budget"].includes(report?.miss) ? "its rest had been evicted" : "";
    if (note) node("text", { x: (rest ? tail : begin) + 15 + 7 * label.length, y: y + 4, class: "note miss" }, group).textContent = note;
    tell(group, label, `${describeState(this.state, request)}${report ? `. ${report.text}` : ""}`, { key: request.key }, request.key);
  }
}
