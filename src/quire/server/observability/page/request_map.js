"use strict";
// The same blocks by request: each row is a request, with its blocks in the order of its table. And the transition between the views.

const MOVE_FOR = 480;            // milliseconds of the transition
const MAX_MOVED = 2500;          // blocks that move; more are cross-faded

class RequestMap {
  constructor(root) {
    this.root = root; this.group = 0; this.state = null; this.rows = []; this.hover = null; this.needsAll = true; this.version = -1;
    const sticky = root.appendChild(make("div", { className: "sticky" }));
    this.canvas = sticky.appendChild(make("canvas"));
    this.spacer = root.appendChild(make("div"));
    this.ctx = this.canvas.getContext("2d", { alpha: false });
    new ResizeObserver(() => this.layout()).observe(root);
    root.addEventListener("scroll", () => { this.needsAll = true; wake(); });
    root.addEventListener("pointermove", event => { this.pointer = [event.clientX, event.clientY]; this.setHover(this.at(event)); });
    root.addEventListener("pointerleave", () => this.setHover(null));
    root.addEventListener("click", event => {
      const found = this.at(event);
      if (found) select(found.block === undefined ? { key: found.request.key } : { block: found.block, group: this.group, isHost: found.isHost });
    });
    root.addEventListener("keydown", event => this.key(event));
  }
  show(state, group) { this.state = state; this.group = group; this.layout(); }
  layout() {
    if (!this.state || !this.root.clientWidth || !this.root.clientHeight) return;
    const scale = this.scale = window.devicePixelRatio || 1;
    this.width = Math.floor((this.root.clientWidth - 8) * scale); this.height = Math.floor(this.root.clientHeight * scale);
    if (this.canvas.width !== this.width || this.canvas.height !== this.height) { this.canvas.width = this.width; this.canvas.height = this.height; }
    this.canvas.style.width = this.width / scale + "px"; this.canvas.style.height = this.height / scale + "px";
    this.gutter = Math.round(118 * scale);
    this.hatch = makePattern(this.ctx, scale, palette.hatch);
    this.needsAll = true;
  }
  /** Collects the requests that own blocks or wait for some, siblings together, and computes the size of their cells. */
  arrange() {
    const order = { running: 0, swapped: 1, waiting: 2 };
    this.rows = [...this.state.requests.values()].filter(request => request.state !== "ended")
      .sort((a, b) => order[a.state] - order[b.state] || a.family - b.family || a.sample - b.sample || a.key - b.key);
    const longest = Math.max(8, ...this.rows.map(request => this.tableOf(request).length + request.given[this.group]));
    const wide = Math.floor((this.width - this.gutter - 8 * this.scale) / longest);
    this.cell = Math.max(Math.round(3 * this.scale), Math.min(Math.round(24 * this.scale), wide));
    this.gap = this.cell >= 12 * this.scale ? 2 * this.scale : this.cell >= 5 * this.scale ? 1 : 0;
    this.row = Math.max(this.cell, Math.round(13 * this.scale)) + Math.round(6 * this.scale);
    this.most = Math.max(1, Math.floor((this.width - this.gutter) / this.cell));
    this.spacer.style.height = Math.max(this.root.clientHeight, this.rows.length * this.row / this.scale + 8) + "px";
  }
  tableOf(request) { return (request.state === "swapped" ? request.hosts : request.tables)[this.group] || []; }
  get top() { return Math.round(this.root.scrollTop * this.scale) - Math.round(4 * this.scale); }
  /** Returns the position of a row's i-th block. */
  place(row, i) { return [this.gutter + i * this.cell, row * this.row - this.top + Math.round((this.row - this.cell) / 2)]; }
  at(event) {
    if (!this.cell) return null;
    const box = this.root.getBoundingClientRect(), row = Math.floor(((event.clientY - box.top) * this.scale + this.top) / this.row), request = this.rows[row];
    if (!request) return null;
    const i = Math.floor(((event.clientX - box.left) * this.scale - this.gutter) / this.cell) - request.given[this.group], table = this.tableOf(request), isHost = request.state === "swapped";
    return i >= 0 && i < table.length ? { request, block: table[i], index: i + request.given[this.group], isHost } : { request, isHost };
  }
  setHover(found) {
    const isSame = found?.request === this.hover?.request && found?.block === this.hover?.block;
    this.hover = found;
    if (!isSame) { this.needsAll = true; setHovered(found ? found.request.key : null); }
    this.showTip();
    wake();
  }
  showTip() {
    const found = this.hover;
    if (!found) { hideTip(this); return; }
    const label = this.state.label(found.request.key);
    if (found.block === undefined) showTip(this, label, describeState(this.state, found.request), ...this.pointer);
    else showTip(this, `${found.isHost ? "Host block" : "Block"} ${fmt(found.block)}`, `number ${found.index} of ${label}: ${describeBlock({ pool: (found.isHost ? this.state.hosts : this.state.pools)[this.group], state: this.state, group: this.group, isHost: found.isHost }, found.block)}`, ...this.pointer);
  }
  key(event) {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move || !this.rows.length) return;
    event.preventDefault(); event.stopPropagation();
    const here = this.rows.findIndex(request => request.key === selection?.key), next = this.rows[Math.max(0, Math.min(this.rows.length - 1, here + move))];
    select({ key: next.key });
    $("said").textContent = `${this.state.label(next.key)}: ${describeState(this.state, next)}`;
  }
  draw() {
    if (!this.state || !this.width) return;
    const pool = this.state.pools[this.group], version = `${this.state.number}/${pool.version}/${focusKey()}/${selection?.block}`;
    if (!this.needsAll && version === this.version) return;
    this.version = version; this.needsAll = false;
    this.arrange();
    const { ctx, scale } = this, focus = this.state.requests.get(focusKey()) || null;
    const lit = this.hover?.block ?? (selection?.block !== undefined && !selection.isHost ? selection.block : -1);
    ctx.fillStyle = palette.panel; ctx.fillRect(0, 0, this.width, this.height);
    const first = Math.max(0, Math.floor(this.top / this.row)), last = Math.min(this.rows.length - 1, Math.floor((this.top + this.height) / this.row));
    for (let row = first; row <= last; row++) this.drawRow(row, this.rows[row], focus, lit);
    if (!this.rows.length) {
      ctx.fillStyle = palette.muted; ctx.font = `${13 * scale}px Inter, system-ui, sans-serif`; ctx.textAlign = "center"; ctx.textBaseline = "middle";
      ctx.fillText("No request runs or waits at this moment.", this.width / 2, this.height / 2);
    }
  }
  drawRow(row, request, focus, lit) {
    const { ctx, scale, group, cell, gap } = this, isHost = request.state === "swapped", table = this.tableOf(request), given = request.given[group];
    const pool = (isHost ? this.state.hosts : this.state.pools)[group], y = row * this.row - this.top, middle = y + this.row / 2, side = cell - gap, isFaded = focus && focus !== request;
    if (focus === request) { ctx.fillStyle = palette.raised; ctx.fillRect(0, y, this.width, this.row); }
    ctx.globalAlpha = isFaded ? 0.5 : 1;
    ctx.fillStyle = ownerColour(request.key).css;
    ctx.beginPath(); ctx.roundRect(8 * scale, middle - 5 * scale, 10 * scale, 10 * scale, 3 * scale); ctx.fill();
    ctx.textBaseline = "middle"; ctx.textAlign = "left"; ctx.fillStyle = palette.ink; ctx.font = `550 ${12 * scale}px Inter, system-ui, sans-serif`;
    ctx.fillText(this.state.label(request.key), 25 * scale, middle + scale);
    ctx.textAlign = "right"; ctx.fillStyle = palette.muted; ctx.font = `${11 * scale}px Inter, system-ui, sans-serif`;
    ctx.fillText(isHost ? "on host" : request.state === "waiting" ? "waiting" : fmt(table.length), this.gutter - 10 * scale, middle + scale);
    ctx.globalAlpha = 1;
    if (request.state === "waiting") {
      const hold = this.state.steps.length ? this.state.steps[this.state.steps.length - 1].hold : null;
      ctx.textAlign = "left"; ctx.fillStyle = palette.warn;
      ctx.fillText(`${plural(request.prompt, "prompt token")} wait${hold ? `: ${HOLDS[hold]}` : ""}`, this.gutter + 2 * scale, middle + scale);
      return;
    }
    for (let i = 0; i < Math.min(given, this.most); i++) {  // blocks before its window
      const [x, top] = this.place(row, i);
      ctx.strokeStyle = palette.line; ctx.lineWidth = scale; ctx.strokeRect(x + 0.5, top + 0.5, Math.max(1, side - 1), Math.max(1, side - 1));
    }
    for (let i = 0; i < table.length && i + given < this.most; i++) {
      const [x, top] = this.place(row, i + given), block = table[i];
      if (side < 6 * scale) { ctx.fillStyle = cssOf(flatColour(pool, block, isFaded ? focus : null, false)); ctx.fillRect(x, top, side, side); }
      else paintCell(ctx, { x, y: top, side, scale, pool, block, focus: isFaded ? focus : null, isMine: false, hatch: this.hatch });
      if (block === lit) { ctx.strokeStyle = palette.accent; ctx.lineWidth = 2 * scale; ctx.strokeRect(x - scale, top - scale, side + 2 * scale, side + 2 * scale); }
    }
    const end = Math.ceil(request.prompt / pool.blockSize), [x, top] = this.place(row, end);
    if (this.state.config.kinds[group] === "attention" && end < table.length + given && end <= this.most) {  // the end of the prompt
      ctx.fillStyle = palette.accent; ctx.fillRect(x - gap / 2 - scale, top - 2 * scale, 2 * scale, side + 4 * scale);
    }
  }
}

/** Moves the blocks from their positions in one view to those in the other. Resolves when they have arrived. */
function moveBlocks(canvas, map, rows, isToRows) {
  const scale = window.devicePixelRatio || 1, box = canvas.parentElement.getBoundingClientRect();
  canvas.width = Math.round(box.width * scale); canvas.height = Math.round(box.height * scale);
  const inset = view => { const own = view.root.getBoundingClientRect(); return [(own.left - box.left) * scale, (own.top - box.top) * scale]; };
  const [mx, my] = inset(map), [rx, ry] = inset(rows), moved = [], side = map.cell - map.gap, other = rows.cell - rows.gap;
  rows.rows.forEach((request, row) => {
    if (request.state === "swapped") return;
    const given = request.given[rows.group];
    rows.tableOf(request).forEach((block, i) => {
      const [x, y] = map.place(block), [u, v] = rows.place(row, i + given);
      if (moved.length <= MAX_MOVED && v > -40 && v < rows.height + 40 && i + given < rows.most) moved.push({ x: x + mx, y: y + my, u: u + rx, v: v + ry, colour: cssOf(flatColour(map.pool, block, null, false)) });
    });
  });
  if (stillness.matches || map.per > 1 || moved.length > MAX_MOVED || !moved.length) return Promise.resolve();
  const ctx = canvas.getContext("2d"), begun = performance.now();
  canvas.hidden = false;
  return new Promise(done => {
    const frame = now => {
      const share = Math.min(1, Math.max(0, (now - begun) / MOVE_FOR)), eased = share < 0.5 ? 4 * share ** 3 : 1 - (-2 * share + 2) ** 3 / 2, t = isToRows ? eased : 1 - eased;
      ctx.fillStyle = palette.panel; ctx.fillRect(0, 0, canvas.width, canvas.height);
      const size = side + (other - side) * t;
      for (const { x, y, u, v, colour } of moved) { ctx.fillStyle = colour; ctx.beginPath(); ctx.roundRect(x + (u - x) * t, y + (v - y) * t, size, size, size * 0.16); ctx.fill(); }
      if (share < 1) requestAnimationFrame(frame);
      else { canvas.hidden = true; done(); }
    };
    requestAnimationFrame(frame);
  });
}
