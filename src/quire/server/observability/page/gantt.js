"use strict";
// A timeline of requests: queued, the prompt in chunks, decoding, preempted, swapped. Above it, the steps as columns.

const ROW = 19;                  // css pixels
const STEPS = 66;                // css pixels of the steps' columns
const GUTTER = 62;
const SHORTEST = 0.2, LONGEST = 3600;  // the visible time span in seconds
const PHASES = { queued: "queued", prefill: "prompt", decode: "decode", preempted: "preempted, its blocks freed", swapped: "on the host" };

class TimeView {
  constructor(root) {
    this.root = root; this.state = null; this.span = 20; this.until = null; this.hover = null; this.version = ""; this.isAtEnd = true;
    const sticky = root.appendChild(make("div", { className: "sticky" }));
    this.canvas = sticky.appendChild(make("canvas"));
    this.spacer = root.appendChild(make("div"));
    this.ctx = this.canvas.getContext("2d", { alpha: false });
    new ResizeObserver(() => this.layout()).observe(root);
    root.addEventListener("scroll", () => { this.isAtEnd = root.scrollTop + root.clientHeight >= root.scrollHeight - 4; this.version = ""; wake(); });
    root.addEventListener("wheel", event => {
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.zoomBy(event.deltaY < 0 ? 1.25 : 0.8, event); }
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); this.pan(event.deltaX); }
    }, { passive: false });
    root.addEventListener("pointerdown", event => { this.grip = { x: event.clientX, until: this.end(), moved: false }; });
    root.addEventListener("pointermove", event => {
      this.pointer = [event.clientX, event.clientY];
      if (this.grip && event.buttons && event.pointerType === "mouse" && Math.abs(event.clientX - this.grip.x) > 3) {
        this.grip.moved = true;
        this.setEnd(this.grip.until - (event.clientX - this.grip.x) / this.perSecond);
      }
      this.setHover(this.at(event));
    });
    root.addEventListener("pointerleave", () => this.setHover(null));
    root.addEventListener("click", event => { const found = this.at(event); if (!this.grip?.moved && found?.request) select({ key: found.request.key }); this.grip = null; });
    root.addEventListener("keydown", event => this.key(event));
  }
  show(state) { if (this.state?.epoch !== state.epoch) this.until = null; this.state = state; this.layout(); }
  layout() {
    if (!this.state || !this.root.clientWidth) return;
    const scale = this.scale = window.devicePixelRatio || 1;
    this.width = this.root.clientWidth - 8; this.height = this.root.clientHeight;
    this.canvas.width = Math.round(this.width * scale); this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.width = this.width + "px"; this.canvas.style.height = this.height + "px";
    this.version = "";
  }
  end() { return this.until ?? this.state.time; }
  get perSecond() { return (this.width - GUTTER - 8) / this.span; }
  x(at) { return GUTTER + (at - this.end() + this.span) * this.perSecond; }
  timeAt(x) { return this.end() - this.span + (x - GUTTER) / this.perSecond; }
  setEnd(until) { this.until = until >= this.state.time ? null : Math.max(this.span * 0.2, until); this.version = ""; wake(); }
  pan(pixels) { this.setEnd(this.end() + pixels / this.perSecond); }
  zoomBy(factor, event) {
    const x = event ? event.clientX - this.root.getBoundingClientRect().left : this.width, at = this.timeAt(x), share = (x - GUTTER) / (this.width - GUTTER - 8);
    this.span = Math.max(SHORTEST, Math.min(LONGEST, this.span / factor));
    if (event) this.setEnd(at + (1 - share) * this.span);
    this.version = "";
    wake();
  }
  key(event) {
    const act = { ArrowLeft: () => this.pan(-60), ArrowRight: () => this.pan(60) }[event.key];
    if (act) { event.preventDefault(); event.stopPropagation(); act(); }
  }
  /** Finds the requests that existed in the visible time. */
  arrange() {
    const from = this.end() - this.span, to = this.end();
    this.rows = [...this.state.requests.values()].filter(request => request.phases.length && request.phases[0].at <= to && (request.over ?? Infinity) >= from)
      .sort((a, b) => a.family - b.family || a.sample - b.sample || a.key - b.key);
    const tall = STEPS + 22 + this.rows.length * ROW + 8;
    this.spacer.style.height = Math.max(this.height, tall) + "px";
    if (this.isAtEnd && this.until === null) this.root.scrollTop = this.root.scrollHeight;
  }
  phasesOf(request) {
    return request.phases.map(({ kind, at }, i) => ({ kind, from: at, to: request.phases[i + 1]?.at ?? request.over ?? this.state.time }));
  }
  at(event) {
    const box = this.root.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top, at = this.timeAt(x);
    if (!this.rows || x < 0) return null;
    if (y < STEPS + 18) {
      const step = this.state.steps.find(one => at >= one.at - Math.max(one.seconds, 2 / this.perSecond) && at <= one.at);
      return step ? { step } : null;
    }
    const request = this.rows[Math.floor((y - STEPS - 22 + this.root.scrollTop) / ROW)];
    if (!request) return null;
    return { request, phase: this.phasesOf(request).findLast(phase => at >= phase.from && at <= phase.to), piece: request.pieces.find(piece => at <= piece.at && at >= piece.at - piece.seconds) };
  }
  setHover(found) {
    this.hover = found;
    setHovered(found?.request ? found.request.key : null);
    this.showTip();
  }
  /** Returns the reason why a request waited in a phase. */
  why({ kind, from, to }) {
    const hold = kind === "queued" || kind === "preempted" || kind === "swapped" ? this.state.holdBetween(from, to) : null;
    return hold ? `: ${HOLDS[hold]}` : "";
  }
  tellPhase(phase) {
    const lasted = duration(Math.max(0, phase.to - phase.from));
    return phase.kind === "queued" ? `waited ${lasted}${this.why(phase)}` : `${PHASES[phase.kind]} for ${lasted}${this.why(phase)}`;
  }
  showTip() {
    const found = this.hover;
    if (!found) { hideTip(this); return; }
    if (found.step) {
      const { number, seconds, prompt, decoded, waiting, hold } = found.step;
      showTip(this, `Step ${fmt(number)}`, `${duration(seconds)}: ${plural(prompt, "prompt token")}, ${fmt(decoded)} decoded${waiting ? `; ${fmt(waiting)} waited${hold ? `, ${HOLDS[hold]}` : ""}` : ""}`, ...this.pointer);
      return;
    }
    const piece = found.piece && found.phase?.kind === "prefill" ? `; prompt tokens ${fmt(found.piece.from)} to ${fmt(found.piece.from + found.piece.count - 1)} in a step of ${duration(found.piece.seconds)}` : "";
    showTip(this, this.state.label(found.request.key), found.phase ? this.tellPhase(found.phase) + piece : describeState(this.state, found.request), ...this.pointer);
  }
  draw() {
    if (!this.state || !this.width) return;
    const version = `${this.state.number}/${this.state.time}/${focusKey()}/${this.until}/${this.span}/${palette.panel}/${this.root.scrollTop}`;
    if (version === this.version) return;
    this.version = version;
    this.arrange();
    const { ctx, scale, width, height, state } = this;
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.fillStyle = palette.panel; ctx.fillRect(0, 0, width, height);
    const focus = focusKey(), top = STEPS + 22 - this.root.scrollTop, first = Math.max(0, Math.floor((STEPS + 18 - top) / ROW)), last = Math.min(this.rows.length - 1, Math.floor((height - top) / ROW));
    this.drawAxis(height);
    ctx.save();
    ctx.beginPath(); ctx.rect(0, STEPS + 18, width, height); ctx.clip();
    for (let i = first; i <= last; i++) this.drawRow(this.rows[i], top + i * ROW, focus === undefined || focus === this.rows[i].key);
    ctx.restore();
    this.drawSteps();
    if (!this.rows.length) {
      ctx.fillStyle = palette.muted; ctx.font = "13px Inter, system-ui, sans-serif"; ctx.textAlign = "center"; ctx.textBaseline = "middle";
      ctx.fillText(`No request in ${duration(this.span)}.`, width / 2, height / 2);
    }
    ctx.textAlign = "left"; ctx.textBaseline = "middle"; ctx.fillStyle = palette.muted; ctx.font = "11px Inter, system-ui, sans-serif";
    ctx.fillText("tokens a step", GUTTER + 4, 8);
    if (state.steps.length === 0) ctx.fillText("This recording has no steps.", GUTTER + 90, 8);
  }
  drawAxis(height) {
    const { ctx } = this, unit = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600].find(one => one * this.perSecond > 78) || 1200;
    ctx.font = "10.5px Inter, system-ui, sans-serif"; ctx.textAlign = "center"; ctx.textBaseline = "middle"; ctx.lineWidth = 1;
    const latest = this.state.time;
    for (let back = Math.ceil((latest - this.end()) / unit - 1e-9) * unit; back <= latest - this.end() + this.span; back += unit) {
      const x = Math.round(this.x(latest - back)) + 0.5;
      ctx.strokeStyle = palette.line; ctx.beginPath(); ctx.moveTo(x, STEPS + 16); ctx.lineTo(x, height); ctx.stroke();
      ctx.fillStyle = palette.faint; ctx.fillText(back < unit / 2 ? "now" : `−${unit < 0.1 ? back.toFixed(2) : unit < 1 ? back.toFixed(1) : Math.round(back)} s`, Math.max(GUTTER + 14, Math.min(this.width - 18, x)), STEPS + 8);
    }
  }
  drawSteps() {
    const { ctx } = this, from = this.end() - this.span, shown = this.state.steps.filter(step => step.at >= from && step.at - step.seconds <= this.end());
    const most = Math.max(1, ...shown.map(step => step.prompt + step.decoded)), high = STEPS - 20, height = count => count ? Math.max(1, high * Math.log1p(count) / Math.log1p(most)) : 0;
    ctx.strokeStyle = palette.line; ctx.lineWidth = 1; ctx.beginPath(); ctx.moveTo(GUTTER, STEPS - 0.5); ctx.lineTo(this.width, STEPS - 0.5); ctx.stroke();
    for (const step of shown) {
      const x = Math.max(GUTTER, this.x(step.at - step.seconds)), right = this.x(step.at), wide = Math.max(1, right - x - (right - x > 4 ? 1 : 0));
      if (right < GUTTER) continue;
      const all = height(step.prompt + step.decoded), part = all * step.prompt / Math.max(1, step.prompt + step.decoded);
      ctx.fillStyle = palette.good; ctx.fillRect(x, STEPS - 1 - all, wide, all - part);
      ctx.fillStyle = palette.accent; ctx.fillRect(x, STEPS - 1 - part, wide, part);
      if (step.hold === "blocks" || step.hold === "swapped") { ctx.fillStyle = palette.bad; ctx.fillRect(x, STEPS - 1, wide, 2); }
    }
    ctx.fillStyle = palette.faint; ctx.textAlign = "right"; ctx.textBaseline = "middle"; ctx.font = "10.5px Inter, system-ui, sans-serif";
    if (shown.length) ctx.fillText(fmt(most), GUTTER - 6, 22);
    ctx.fillText("0", GUTTER - 6, STEPS - 4);
  }
  drawRow(request, y, isLit) {
    const { ctx } = this, middle = y + ROW / 2, colour = ownerColour(request.key).css;
    if (selection?.key === request.key) { ctx.fillStyle = palette.raised; ctx.fillRect(0, y, this.width, ROW); }
    ctx.globalAlpha = isLit ? 1 : 0.35;
    ctx.fillStyle = palette.ink; ctx.font = `${request.state === "ended" ? 450 : 600} 11.5px Inter, system-ui, sans-serif`; ctx.textAlign = "right"; ctx.textBaseline = "middle";
    ctx.fillText(this.state.label(request.key), GUTTER - 7, middle + 0.5);
    ctx.save();
    ctx.beginPath(); ctx.rect(GUTTER, y, this.width - GUTTER, ROW); ctx.clip();
    for (const { kind, from, to } of this.phasesOf(request)) {
      const x = this.x(from), wide = Math.max(1.5, this.x(to) - x);
      if (x > this.width || x + wide < GUTTER) continue;
      if (kind === "queued" || kind === "preempted") {
        ctx.strokeStyle = kind === "queued" ? palette.warn : palette.bad; ctx.lineWidth = 2; ctx.setLineDash(kind === "queued" ? [2, 3] : [5, 3]);
        ctx.beginPath(); ctx.moveTo(x, middle); ctx.lineTo(x + wide, middle); ctx.stroke(); ctx.setLineDash([]);
        const told = this.tellPhase({ kind, from, to });
        if (wide > 7 * told.length) { ctx.fillStyle = palette.panel; ctx.fillRect(x + 6, y + 3, 5.6 * told.length + 8, ROW - 6); ctx.fillStyle = ctx.strokeStyle; ctx.font = "11px Inter, system-ui, sans-serif"; ctx.textAlign = "left"; ctx.fillText(told, x + 9, middle + 0.5); }
      } else if (kind === "swapped") { ctx.strokeStyle = palette.swap; ctx.lineWidth = 1.5; ctx.strokeRect(x + 0.75, y + 5.5, Math.max(1, wide - 1.5), ROW - 11); }
      else {
        ctx.fillStyle = kind === "prefill" ? palette.accent : colour;
        ctx.beginPath(); ctx.roundRect(x, kind === "prefill" ? y + 3 : y + 5, wide, kind === "prefill" ? ROW - 6 : ROW - 10, 2.5); ctx.fill();
      }
    }
    ctx.fillStyle = palette.panel;
    for (const piece of request.pieces) {  // lines separate consecutive chunks
      const x = this.x(piece.at);
      if (piece.from + piece.count < request.prompt && x > GUTTER) ctx.fillRect(x - 0.75, y + 3, 1.5, ROW - 6);
    }
    if (request.over !== null) { const x = this.x(request.over); ctx.fillStyle = request.reason === "error" ? palette.bad : palette.faint; ctx.fillRect(x, y + 3, 2, ROW - 6); }
    ctx.restore();
    ctx.globalAlpha = 1;
  }
}
