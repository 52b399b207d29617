"use strict";
// The numbers at the top, and their sparklines of the last minute.

function drawGauges(state) {
  const usage = state.usage(), gauges = state.gauges, config = state.config, last = state.series[state.series.length - 1] || {};
  put($("g-used"), fmt(usage.used_blocks)); put($("g-of"), `of ${fmt(usage.num_blocks)} owned`);
  const [own, keep] = document.querySelectorAll(".bar i");
  own.style.width = 100 * usage.used_blocks / usage.num_blocks + "%"; keep.style.width = 100 * usage.cached_blocks / usage.num_blocks + "%";
  const kept = gauges.kept || [], keptBlocks = kept.reduce((sum, [, blocks]) => sum + blocks, 0);
  put($("g-pool"), `${fmt(usage.cached_blocks)} reusable${kept.length ? `, ${fmt(keptBlocks)} kept` : ""} · ${percent(usage.wasted_slots, usage.used_blocks * config.block_size)} wasted`);
  $("g-pool").title = kept.map(([key, blocks, left], i) => `${key || `key ${i + 1}`}: ${plural(blocks, "block")} kept for ${duration(left)}`).join("\n");
  put($("g-saved"), fmt(usage.shared_blocks));
  put($("g-saves"), usage.shared_blocks ? `${percent(usage.shared_blocks, usage.logical_blocks)} of all table entries` : "nothing is shared");
  put($("g-hit"), !config.prefix_caching ? "off" : gauges.asked_tokens ? percent(gauges.cached_tokens, gauges.asked_tokens) : "–");
  put($("g-hits"), `${fmt(gauges.hits + gauges.partial_hits)} of ${plural(gauges.hits + gauges.partial_hits + gauges.misses, "prompt")}`);
  put($("g-running"), fmt(gauges.running));
  put($("g-queue"), `${fmt(gauges.waiting)} waiting${gauges.swapped ? ` · ${fmt(gauges.swapped)} out` : ""}`);
  put($("g-rate"), fmt(last.rate || 0)); put($("g-prompt"), `prompts ${fmt(last.prompt || 0)}/s${draftsOf(gauges)}`);
  put($("g-copies"), brief(gauges.copies)); put($("g-evictions"), brief(gauges.evictions));
  put($("g-preemptions"), brief(gauges.preemptions)); put($("g-swaps"), brief(gauges.swapped_out + gauges.swapped_in));
  if (drawGauges.series === last.time && drawGauges.theme === palette.panel) return;
  drawGauges.series = last.time; drawGauges.theme = palette.panel;
  document.querySelectorAll("canvas[data-series]").forEach(canvas => sparkline(canvas, state.series));
  if (tipOwner?.dataset?.series) tellSpark(tipOwner, state.series);
}

function draftsOf(gauges) {
  const { drafted_tokens: drafted, accepted_tokens: accepted } = gauges;
  return drafted ? ` · drafts: ${brief(accepted)} accepted, ${brief(drafted - accepted)} rejected` : "";
}

// For each sparkline: its colour, its maximum, and the text of a value.
const COURSES = {
  pool: { colour: "accent", most: () => 1, value: point => point.used, say: point => `${percent(point.used, 1)} owned, ${percent(point.kept, 1)} reusable` },
  saved: { colour: "accent", value: point => point.saved, say: point => plural(point.saved, "block") + " saved" },
  hit: { colour: "accent", most: () => 1, value: point => point.hit, say: point => `${percent(point.hit, 1)} of all prompt tokens so far` },
  running: { colour: "accent", value: point => point.running, say: point => `${fmt(point.running)} running, ${fmt(point.waiting)} waiting` },
  rate: { colour: "good", value: point => point.rate, say: point => `${fmt(point.rate)} new tokens a second, prompts ${fmt(point.prompt)}` },
  copies: { colour: "warn", isCount: true, value: point => point.copies, say: point => `${fmt(point.copies)} ${point.copies === 1 ? "copy" : "copies"}` },
  evictions: { colour: "bad", isCount: true, value: point => point.evictions, say: point => plural(point.evictions, "eviction") },
  preemptions: { colour: "muted", isCount: true, value: point => point.preemptions, say: point => plural(point.preemptions, "preemption") },
  swaps: { colour: "swap", isCount: true, value: point => point.swaps, say: point => plural(point.swaps, "block") + " swapped" },
};

const MARGIN = 28, COUNT_MARGIN = 16;  // css pixels to the right of a sparkline, for its scale
function sparkline(canvas, series) {
  const scale = window.devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const ctx = canvas.getContext("2d"), course = COURSES[canvas.dataset.series], span = Math.max(24, series.length), right = width - (course.isCount ? COUNT_MARGIN : MARGIN) * scale, step = right / (span - 1), from = span - series.length;
  ctx.clearRect(0, 0, width, height);
  if (!series.length) return;
  const colour = palette[course.colour], most = course.most?.() ?? Math.max(1, ...series.map(course.value));
  if (course.isCount) {
    ctx.fillStyle = colour;
    series.forEach((point, i) => { const value = course.value(point), high = value ? Math.max(1.5 * scale, height * value / most) : 0; ctx.fillRect(Math.round((from + i) * step), height - high, Math.max(1, step - 0.5), high); });
    ctx.fillStyle = palette.line; ctx.fillRect(0, height - 1, width, 1);
  } else {
    const area = (value, line) => {
      ctx.beginPath();
      series.forEach((point, i) => { const y = height - (height - 3 * scale) * value(point) / most; i ? ctx.lineTo((from + i) * step, y) : ctx.moveTo((from + i) * step, y); });
      ctx.strokeStyle = line; ctx.lineWidth = 1.4 * scale; ctx.stroke();
      ctx.lineTo(right, height); ctx.lineTo(from * step, height); ctx.closePath();
      ctx.globalAlpha = 0.16; ctx.fillStyle = line; ctx.fill(); ctx.globalAlpha = 1;
    };
    if (canvas.dataset.series === "pool") area(point => point.used + point.kept, palette.hatch);
    area(course.value, colour);
  }
  // The scale: the highest value, and the time span.
  ctx.font = `${9.5 * scale}px Inter, system-ui, sans-serif`; ctx.fillStyle = palette.faint; ctx.textBaseline = "top"; ctx.textAlign = "right";
  const top = canvas.dataset.series === "pool" || canvas.dataset.series === "hit" ? "100%" : brief(most);
  if (course.isCount ? most > 1 : true) ctx.fillText(top, width - scale, 0);
  if (series.length > 1 && !course.isCount) { ctx.textBaseline = "bottom"; ctx.fillText(`${Math.round(series[series.length - 1].time - series[0].time)} s`, width - scale, height); }
}
function tellSpark(canvas, series) {
  const box = canvas.getBoundingClientRect(), span = Math.max(24, series.length), [x, y] = canvas.pointer;
  const wide = box.width - (COURSES[canvas.dataset.series].isCount ? COUNT_MARGIN : MARGIN), i = Math.round(Math.min(1, (x - box.left) / wide) * (span - 1)) - (span - series.length), point = series[i];
  if (!point) { hideTip(canvas); return; }
  const back = series[series.length - 1].time - point.time;
  showTip(canvas, back < 0.3 ? "now" : `${duration(back)} ago`, COURSES[canvas.dataset.series].say(point), x, y);
}
for (const canvas of document.querySelectorAll("canvas[data-series]")) {
  canvas.addEventListener("pointermove", event => { canvas.pointer = [event.clientX, event.clientY]; if (timeline.state) tellSpark(canvas, timeline.state.series); });
  canvas.addEventListener("pointerleave", () => hideTip(canvas));
}
