"use strict";
// A pool by block id: one cell per block, or, if there are too many, one tile for each 2, 4, 8, ... blocks.

const MAX_FLASHES = 240;
const SMALLEST = 5;              // css pixels of a cell; below, several blocks share a tile
const FLASHES = { alloc: 350, copy: 300, evict: 650, swap: 650 };  // milliseconds
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

class BlockMap {
  constructor(root, isHost) {
    this.root = root; this.isHost = isHost; this.group = 0; this.zoom = 1; this.state = null; this.pool = null;
    this.flashes = []; this.hover = -1; this.faded = null; this.drawn = { cells: 0, all: 0, frames: 0, ms: 0, worst: 0 };
    this.showsUnused = isHost; this.showsAllCopies = false; this.follows = false; this.lastActive = -1; this.followDue = 0;
    const sticky = root.appendChild(make("div", { className: "sticky" }));
    this.canvas = sticky.appendChild(make("canvas"));
    this.fx = sticky.appendChild(make("canvas", { className: "fx" }));
    this.spacer = root.appendChild(make("div"));
    this.ctx = this.canvas.getContext("2d", { alpha: false }); this.fxctx = this.fx.getContext("2d");
    this.needsAll = true; this.fxDirty = false;
    new ResizeObserver(() => this.layout()).observe(root);
    root.addEventListener("scroll", () => { this.needsAll = true; this.fxDirty = true; });
    root.addEventListener("wheel", event => { if (!event.ctrlKey && !event.metaKey) this.anchor = null; }, { passive: true });
    root.addEventListener("pointermove", event => this.point(event));
    root.addEventListener("pointerleave", () => this.leave());
    root.addEventListener("click", event => { const block = this.blockAt(event); if (block >= 0) select({ block, group: this.group, isHost }); });
    root.addEventListener("dblclick", event => this.zoomBy(2, event));
    root.addEventListener("wheel", event => {
      const isFree = this.root.scrollHeight <= this.root.clientHeight + 1;  // nothing to scroll: the wheel may zoom
      if (!(event.ctrlKey || event.metaKey || (isFree && event.deltaY < 0))) { this.follows = false; return; }
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1.2 : 1 / 1.2, event);
    }, { passive: false });
    root.addEventListener("keydown", event => this.key(event));
  }
  show(state, group) {
    if (this.group !== group || this.state?.epoch !== state.epoch) this.zoom = 1;
    this.state = state; this.group = group;
    this.pool = (this.isHost ? state.hosts : state.pools)[group];
    this.flashes.length = 0;
    this.layout();
  }
  /** Returns the number of shown blocks: all, or those up to the last one that was ever used, and some room. */
  wanted() {
    const { size, high } = this.pool;
    if (this.showsUnused) return size;
    let count = 64;
    while (count < high) count = Math.ceil(count * 1.3 / 16) * 16;
    return count >= size * 0.85 ? size : count;
  }
  layout() {
    if (!this.pool) return;
    const scale = this.scale = window.devicePixelRatio || 1, low = this.root.clientWidth - 12, high = this.root.clientHeight;
    if (low <= 20 || high <= 10) return;
    const count = this.count = this.wanted();
    this.gutter = Math.round((String(Math.max(0, count - 1)).length * 7 + 10) * scale);
    const width = Math.floor(low * scale) - this.gutter, height = Math.floor(high * scale), room = height - 8 * scale;
    const rawColumns = cell => Math.max(1, Math.floor(width / cell));
    const niceColumns = cell => {  // a round number, for readable labels
      const most = rawColumns(cell), unit = most >= 200 ? 50 : most >= 64 ? 8 : most >= 8 ? 4 : 1;
      return most - most % unit;
    };
    const largest = (columnsOf, units, most) => {
      let cell = Math.max(2, Math.min(Math.round(most * scale), width));
      while (cell > 2 && Math.ceil(units / columnsOf(cell)) * cell > room) cell--;
      return cell;
    };
    let per = 1;
    while (largest(rawColumns, Math.ceil(count / per), 60) < SMALLEST * scale) per *= 2;
    const units = Math.ceil(count / per), most = per > 1 ? 14 : 60;
    const raw = largest(rawColumns, units, most), nice = largest(niceColumns, units, most), columnsOf = nice >= 0.93 * raw ? niceColumns : rawColumns;
    const fitted = columnsOf === niceColumns ? nice : raw;
    this.fitted = fitted / Math.sqrt(per);  // device pixels of a block's side
    this.mostZoom = Math.max(1, 64 * scale / this.fitted);
    this.zoom = Math.min(this.zoom, this.mostZoom);
    const side = this.fitted * this.zoom;
    if (this.zoom === 1) { this.per = per; this.cell = fitted; }
    else if (side >= SMALLEST * scale) { this.per = 1; this.cell = Math.round(side); }
    else { this.per = Math.min(per, Math.max(2, 2 ** Math.round(2 * Math.log2(fitted / side)))); this.cell = fitted; }
    this.columns = columnsOf(this.cell); this.rows = Math.ceil(Math.ceil(count / this.per) / this.columns);
    this.gap = this.cell >= 26 * scale ? 3 * scale : this.cell >= 12 * scale ? 2 * scale : this.cell >= 5 ? 1 : 0;
    this.width = Math.floor(low * scale); this.height = height; this.pad = Math.round(4 * scale);
    for (const canvas of [this.canvas, this.fx]) {
      if (canvas.width !== this.width || canvas.height !== height) { canvas.width = this.width; canvas.height = height; }
      canvas.style.width = this.width / scale + "px"; canvas.style.height = high + "px";
    }
    const tall = Math.ceil((this.rows * this.cell + 2 * this.pad) / scale);
    this.spacer.style.height = (tall <= high + 2 ? high : tall) + "px";
    this.stamps = new Uint32Array(Math.ceil(count / this.per)); this.stamp = 0;
    this.hatch = makePattern(this.ctx, scale, palette.hatch);
    this.needsAll = this.fxDirty = true;
  }
  /** Zooms around the block below the pointer; without a pointer, the selected block, the last active one, or the middle. */
  zoomBy(factor, event) {
    if (!this.pool || !this.cell) return;
    const box = this.root.getBoundingClientRect(), middle = box.top + box.height / 2;
    let y = event?.clientY ?? middle, anchor = event ? this.anchorAt(event) : -1;
    if (anchor < 0 && !event) anchor = selection?.block !== undefined && selection.isHost === this.isHost ? selection.block : this.lastActive;
    if (anchor < 0) anchor = this.blockAt({ clientX: box.left + box.width / 2, clientY: y });
    if (anchor < 0) anchor = 0;
    if (!event) y = middle;
    this.zoom = Math.max(1, Math.min(this.mostZoom, this.zoom * factor));
    if (this.zoom < 1.05) this.zoom = 1;
    this.layout();
    this.scrollTo(anchor, (y - box.top) / box.height);
    wake();
  }
  /** Returns the block below the pointer: the same one until the pointer moves, even if rows are laid out again. */
  anchorAt({ clientX, clientY }) {
    const { x, y, block } = this.anchor || {};
    if (x !== clientX || y !== clientY || block >= this.count) this.anchor = { x: clientX, y: clientY, block: this.blockAt({ clientX, clientY }) };
    return this.anchor.block;
  }
  /** Scrolls so that the block is at that share of the height. */
  scrollTo(block, share = 0.5) {
    const row = (Math.floor(Math.floor(block / this.per) / this.columns) + 0.5) * this.cell / this.scale;
    this.root.scrollTop = row - share * this.root.clientHeight;
  }
  /** Makes a block visible, as a separate cell. */
  reveal(block) {
    if (block >= this.count) { this.showsUnused = true; this.layout(); }
    if (this.per > 1) { this.zoom = Math.min(this.mostZoom, 14 * this.scale / this.fitted); this.layout(); }
    const [, y] = this.place(block);
    if (y < 0 || y + this.cell > this.height) this.scrollTo(block);
    wake();
  }
  get top() { return Math.round(this.root.scrollTop * this.scale) - this.pad; }  // of the visible part, relative to the first row
  place(block) { const unit = Math.floor(block / this.per); return [this.gutter + unit % this.columns * this.cell, Math.floor(unit / this.columns) * this.cell - this.top]; }
  centre(block) { const [x, y] = this.place(block), half = (this.cell - this.gap) / 2; return [x + half, y + half]; }
  blockAt(event) {
    if (!this.pool || !this.cell) return -1;
    const box = this.root.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * this.scale - this.gutter) / this.cell);
    const row = Math.floor(((event.clientY - box.top) * this.scale + this.top) / this.cell);
    const block = (row * this.columns + column) * this.per;
    return column >= 0 && column < this.columns && block >= 0 && block < this.count ? block : -1;
  }
  point(event) {
    const block = this.blockAt(event);
    if (block !== this.hover) { this.hover = block; this.fxDirty = true; }
    this.pointer = [event.clientX, event.clientY];
    this.showTip();
  }
  /** Shows a tip for the block below the pointer, also if the block changes without the pointer. */
  showTip() {
    if (this.hover < 0) { hideTip(this); return; }
    if (this.per === 1) showTip(this, `${this.isHost ? "Host block" : "Block"} ${fmt(this.hover)}`, describeBlock(this, this.hover), ...this.pointer);
    else showTip(this, `Blocks ${fmt(this.hover)} to ${fmt(Math.min(this.count, this.hover + this.per) - 1)}`, this.tellTile(this.hover), ...this.pointer);
  }
  leave() { if (this.hover >= 0) { this.hover = -1; this.fxDirty = true; } hideTip(this); }
  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns * this.per, ArrowDown: this.columns * this.per }[event.key];
    if (!move || !this.pool) return;
    event.preventDefault(); event.stopPropagation();
    const isHere = selection && selection.block !== undefined && selection.isHost === this.isHost && selection.group === this.group;
    const block = isHere ? selection.block + move : 0;
    if (block < 0 || block >= this.count) return;
    select({ block, group: this.group, isHost: this.isHost });
    const row = Math.floor(Math.floor(block / this.per) / this.columns) * this.cell / this.scale, cell = this.cell / this.scale;
    if (row < this.root.scrollTop) this.root.scrollTop = row;
    else if (row + cell > this.root.scrollTop + this.root.clientHeight) this.root.scrollTop = row + cell - this.root.clientHeight;
    $("said").textContent = `Block ${block}: ${describeBlock(this, block)}`;
  }

  /** Returns the request in focus if it owns blocks here, and marks these in this.mine. */
  chosen() {
    const request = this.state.requests.get(focusKey());
    const table = request && (this.isHost ? request.hosts : request.tables)[this.group];
    if (!table || !table.length) return null;
    if (!this.mine || this.mine.length !== this.pool.size) this.mine = new Uint8Array(this.pool.size);
    this.mine.fill(0);
    for (const block of table) this.mine[block] = 1;
    return request;
  }
  /** Counts a tile's blocks that are owned, shared and reusable, and adds up the colours of the owned ones. */
  density(first, chosen) {
    const { refs, cached } = this.pool, end = Math.min(this.count, first + this.per), found = { all: end - first, used: 0, shared: 0, kept: 0, mine: 0, r: 0, g: 0, b: 0 };
    for (let block = first; block < end; block++) {
      if (!refs[block]) { found.kept += cached[block]; continue; }
      const isMine = chosen && this.mine[block], [r, g, b] = flatColour(this.pool, block, chosen, isMine);
      found.used++; found.r += r; found.g += g; found.b += b;
      if (refs[block] > 1) found.shared++;
      if (isMine) found.mine++;
    }
    return found;
  }
  tellTile(first) {
    const { all, used, shared, kept } = this.density(first, null);
    return [`${used} of ${all} owned`, shared && `${shared} of them shared`, kept && `${kept} reusable`].filter(Boolean).join(", ");
  }
  drawTile(unit, chosen) {
    const first = unit * this.per, [x, y] = this.place(first), side = this.cell - this.gap, ctx = this.ctx;
    if (y + this.cell < 0 || y > this.height) return;
    this.drawn.cells++;
    const { all, used, kept, r, g, b } = this.density(first, chosen);
    ctx.fillStyle = palette.free;
    ctx.fillRect(x, y, side, side);
    const high = used ? Math.max(1, Math.round(side * used / all)) : 0, dim = kept ? Math.max(1, Math.round(side * kept / all)) : 0;
    if (dim) { ctx.fillStyle = cssOf(palette.flatCached); ctx.fillRect(x, y + Math.max(0, side - high - dim), side, Math.min(dim, side)); }
    if (high) { ctx.fillStyle = cssOf([r, g, b].map(sum => Math.round(sum / used))); ctx.fillRect(x, y + side - high, side, high); }
  }
  drawCell(block, chosen) {
    const ctx = this.ctx, [x, y] = this.place(block), side = this.cell - this.gap;
    if (y + this.cell < 0 || y > this.height) return;
    this.drawn.cells++;
    const isMine = chosen && this.mine[block];
    if (side < 6) { ctx.fillStyle = cssOf(flatColour(this.pool, block, chosen, isMine)); ctx.fillRect(x, y, side, side); return; }
    ctx.fillStyle = palette.panel;
    ctx.fillRect(x, y, this.cell, this.cell);
    paintCell(ctx, { x, y, side, scale: this.scale, pool: this.pool, block, focus: chosen, isMine, hatch: this.hatch });
  }
  drawAll(chosen) {
    const ctx = this.ctx;
    ctx.fillStyle = palette.panel;
    ctx.fillRect(0, 0, this.width, this.height);
    const first = Math.max(0, Math.floor(this.top / this.cell)), last = Math.min(this.rows - 1, Math.floor((this.top + this.height) / this.cell));
    const units = Math.ceil(this.count / this.per);
    this.drawn.all++;
    for (let unit = first * this.columns; unit < Math.min(units, (last + 1) * this.columns); unit++) {
      if (this.per > 1) this.drawTile(unit, chosen); else this.drawCell(unit, chosen);
    }
    const every = Math.ceil(17 * this.scale / this.cell);
    ctx.font = `${Math.round(10.5 * this.scale)}px Inter, system-ui, sans-serif`;
    ctx.textAlign = "right"; ctx.textBaseline = "middle"; ctx.fillStyle = palette.faint;
    for (let row = Math.ceil(first / every) * every; row <= last; row += every) {
      const middle = row * this.cell - this.top + Math.max(this.cell - this.gap, 11 * this.scale) / 2;
      ctx.fillText(String(row * this.columns * this.per), this.gutter - 7 * this.scale, middle);
    }
  }
  drawDirty(chosen) {
    if (this.per === 1) { for (const block of this.pool.dirty) if (block < this.count) this.drawCell(block, chosen); return; }
    this.stamp++;
    for (const block of this.pool.dirty) {
      const unit = Math.floor(block / this.per);
      if (unit < this.stamps.length && this.stamps[unit] !== this.stamp) { this.stamps[unit] = this.stamp; this.drawTile(unit, chosen); }
    }
  }
  draw(now) {
    if (!this.pool || !this.cell) return;
    const begun = performance.now();
    if (!this.showsUnused && this.pool.high > this.count) this.layout();
    const isChanged = this.pool.dirty.length > 0;
    const chosen = this.needsAll || isChanged ? this.chosen() : this.faded;
    if (chosen !== this.faded) { this.faded = chosen; this.needsAll = true; }
    if (this.needsAll) { this.drawAll(chosen); this.needsAll = false; this.note(begun); }
    else if (isChanged) { this.drawDirty(chosen); this.note(begun); }
    this.pool.clean();
    if (isChanged && this.hover >= 0) this.showTip();
    if (isChanged && chosen) this.fxDirty = true;
    if (this.follows && this.lastActive >= 0 && now >= this.followDue && this.root.scrollHeight > this.root.clientHeight + 1) {
      const [, y] = this.place(this.lastActive);
      this.followDue = now + 700;
      if (y < this.cell || y > this.height - 2 * this.cell) this.scrollTo(this.lastActive);
    }
    if (this.flashes.length || this.fxDirty) this.drawEffects(now);
  }
  note(begun) { const ms = performance.now() - begun; this.drawn.frames++; this.drawn.ms += ms; this.drawn.worst = Math.max(this.drawn.worst, ms); }
  flash({ kind, block, src, key }, now) {
    if (block < this.count) this.lastActive = block;
    if (this.flashes.length < MAX_FLASHES && !stillness.matches) this.flashes.push({ kind, block, src, key, start: now, end: now + FLASHES[kind] });
  }
  drawEffects(now) {
    const ctx = this.fxctx, side = this.cell - this.gap, colours = { alloc: palette.good, copy: palette.warn, evict: palette.bad, swap: palette.swap };
    ctx.clearRect(0, 0, this.width, this.height);
    this.flashes = this.flashes.filter(flash => flash.end > now);
    const calm = Math.max(0.35, Math.min(1, 80 / this.flashes.length)), chosen = this.faded;  // weaker if there are many
    for (const { kind, block, src, key, start, end } of this.flashes) {
      const left = (end - now) / (end - start), [x, y] = this.place(block);
      if (y + this.cell < 0 || y > this.height) continue;
      ctx.globalAlpha = Math.min(1, left * 1.6) * calm * (chosen && !this.mine[block] ? 0.3 : 1);
      ctx.fillStyle = ctx.strokeStyle = colours[kind];
      if (side < 12 * this.scale) ctx.fillRect(x, y, side, side);  // a ring would be too small to see
      else {
        const width = Math.max(2, side / 9), grow = (1 - left) * 3 * this.scale;
        ctx.lineWidth = width;
        ctx.strokeRect(x + width / 2 - grow / 2, y + width / 2 - grow / 2, side - width + grow, side - width + grow);
      }
      if (kind === "copy" && (this.showsAllCopies || key === focusKey())) this.drawArc(src, block, 1 - left);
    }
    ctx.globalAlpha = 1;
    if (chosen && this.per === 1 && this.cell >= 8 * this.scale) this.drawPath(chosen);
    if (this.hover >= 0) this.ring(this.hover, palette.muted, 1.5);
    if (selection && selection.block !== undefined && selection.isHost === this.isHost && selection.group === this.group) this.ring(selection.block, palette.accent, 2.5);
    this.fxDirty = false;
  }
  drawArc(src, dst, done) {
    const ctx = this.fxctx, [sx, sy] = this.centre(src), [x, y] = this.centre(dst), bend = Math.min(60 * this.scale, Math.hypot(x - sx, y - sy) / 3);
    const reach = Math.min(1, done * 2.2), mx = (x + sx) / 2, my = (y + sy) / 2 - bend;
    ctx.lineWidth = 2 * this.scale;
    ctx.beginPath(); ctx.moveTo(sx, sy);
    for (let t = 0.1; t <= reach + 0.001; t += 0.1) { const u = 1 - t; ctx.lineTo(u * u * sx + 2 * u * t * mx + t * t * x, u * u * sy + 2 * u * t * my + t * t * y); }
    ctx.stroke();
  }
  /** Draws a line through the blocks of the request in focus, in the order of its table. */
  drawPath(request) {
    const ctx = this.fxctx, table = (this.isHost ? request.hosts : request.tables)[this.group].slice(0, 600);
    ctx.lineJoin = "round";
    for (const [colour, width, alpha] of [[palette.panel, 4, 0.6], [palette.ink, 1.5, 0.85]]) {
      ctx.strokeStyle = colour; ctx.lineWidth = width * this.scale; ctx.globalAlpha = alpha;
      ctx.beginPath();
      table.forEach((block, i) => { const [x, y] = this.centre(block); if (i) ctx.lineTo(x, y); else ctx.moveTo(x, y); });
      ctx.stroke();
    }
    const [x, y] = this.centre(table[0]);
    ctx.fillStyle = palette.ink;
    ctx.beginPath(); ctx.arc(x, y, 3.5 * this.scale, 0, 7); ctx.fill();
    ctx.globalAlpha = 1;
  }
  ring(block, colour, width) {
    const ctx = this.fxctx, side = this.cell - this.gap, [x, y] = this.place(block), out = Math.max(side, 5 * this.scale), off = (side - out) / 2;
    ctx.strokeStyle = colour; ctx.lineWidth = width * this.scale;
    ctx.strokeRect(x + off - 1.5 * this.scale, y + off - 1.5 * this.scale, out + 3 * this.scale, out + 3 * this.scale);
  }
}

/** All of a map's blocks in a narrow strip at its right, with a frame around the visible ones. */
class Minimap {
  constructor(canvas, map) {
    this.canvas = canvas; this.map = map; this.ctx = canvas.getContext("2d");
    const go = event => {
      const box = canvas.getBoundingClientRect(), { root } = map;
      map.follows = false;
      root.scrollTop = (event.clientY - box.top) / box.height * root.scrollHeight - root.clientHeight / 2;
    };
    canvas.addEventListener("pointerdown", event => { canvas.setPointerCapture(event.pointerId); go(event); });
    canvas.addEventListener("pointermove", event => { if (event.buttons) go(event); });
    map.root.addEventListener("scroll", () => this.draw());
  }
  draw() {
    const { map, canvas, ctx } = this, isNeeded = map.pool && map.root.scrollHeight > map.root.clientHeight + 1;
    canvas.hidden = !isNeeded;
    if (!isNeeded) return;
    const scale = window.devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    const { refs, cached } = map.pool, lines = Math.floor(height / (2 * scale)), chosen = map.faded;
    ctx.fillStyle = palette.free; ctx.fillRect(0, 0, width, height);
    for (let line = 0; line < lines; line++) {
      const from = Math.floor(line * map.count / lines), to = Math.max(from + 1, Math.floor((line + 1) * map.count / lines));
      let used = 0, shared = 0, kept = 0, mine = 0;
      for (let block = from; block < to; block++) {
        if (refs[block]) { used++; if (refs[block] > 1) shared++; if (chosen && map.mine[block]) mine++; } else kept += cached[block];
      }
      const y = Math.round(line * height / lines), high = Math.ceil(height / lines), part = count => Math.ceil(width * count / (to - from));
      ctx.fillStyle = palette.hatch; ctx.fillRect(0, y, part(used + kept), high);
      ctx.fillStyle = palette.accent; ctx.fillRect(0, y, part(used), high);
      if (shared) { ctx.fillStyle = palette.shared; ctx.fillRect(0, y, part(shared), high); }
      if (mine) { ctx.fillStyle = ownerColour(chosen.key).css; ctx.fillRect(0, y, width, high); }
    }
    const { root } = map, top = root.scrollTop / root.scrollHeight * height, tall = Math.max(4 * scale, root.clientHeight / root.scrollHeight * height);
    ctx.strokeStyle = palette.ink; ctx.lineWidth = 1.5 * scale;
    ctx.strokeRect(scale, top + scale, width - 2 * scale, tall - 2 * scale);
  }
}
