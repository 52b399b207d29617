"use strict";
// The colours of the drawings: those of the theme, and one for each request.

const palette = {};
function readPalette() {
  const style = getComputedStyle(document.documentElement), value = name => style.getPropertyValue("--" + name).trim();
  for (const name of ["bg", "free", "cached", "hatch", "shared", "on-shared", "ink", "muted", "faint", "line", "panel", "raised", "accent", "good", "warn", "bad", "swap"]) palette[name] = value(name);
  palette.lightness = +value("owner-l"); palette.chroma = +value("owner-c"); palette.dim = +value("dim");
  palette.owners = new Map(); palette.mixed = new Map();
  palette.flatFree = rgbOf(palette.free); palette.flatCached = mix(palette.flatFree, rgbOf(palette.hatch), 0.55); palette.flatShared = rgbOf(palette.shared);
}
function rgbOf(css) { const digits = parseInt(css.slice(1), 16); return [digits >> 16, digits >> 8 & 255, digits & 255]; }
/** Returns a request's colour. Hues are a golden angle apart, with similar lightness. */
function ownerColour(key) {
  let found = palette.owners.get(key);
  if (found) return found;
  if (palette.owners.size > 4000) palette.owners.clear();
  const hue = (40 + key * 137.508) % 360 * Math.PI / 180, L = palette.lightness + [0, 0.045, -0.05][key % 3], C = palette.chroma;
  const a = C * Math.cos(hue), b = C * Math.sin(hue);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3, m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3, s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s, -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s, -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s];
  const rgb = linear.map(x => Math.round(255 * Math.max(0, Math.min(1, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055))));
  palette.owners.set(key, found = { rgb, css: `rgb(${rgb})` });
  return found;
}
function mix(a, b, share) { return a.map((x, i) => Math.round(x + (b[i] - x) * share)); }
function cssOf([r, g, b]) {
  const name = r << 16 | g << 8 | b;
  let css = palette.mixed.get(name);
  if (!css) { if (palette.mixed.size > 20_000) palette.mixed.clear(); palette.mixed.set(name, css = `rgb(${r} ${g} ${b})`); }
  return css;
}
/** Returns the only colour of a small block. focus: the highlighted request, if any; isMine: whether it owns the block. */
function flatColour(pool, block, focus, isMine) {
  const { refs, sums, fill, cached, blockSize } = pool;
  if (!refs[block]) return cached[block] ? palette.flatCached : palette.flatFree;
  const own = isMine ? ownerColour(focus.key).rgb : refs[block] > 1 ? palette.flatShared : ownerColour(sums[block]).rgb;
  const share = (focus && !isMine ? palette.dim : 1) * (0.3 + 0.7 * fill[block] / blockSize);
  return share === 1 ? own : mix(palette.flatFree, own, share);
}
const makePattern = (ctx, scale, colour) => {
  const tile = document.createElement("canvas"), step = Math.max(3, Math.round(4.5 * scale)), pen = tile.getContext("2d");
  tile.width = tile.height = step;
  pen.strokeStyle = colour; pen.lineWidth = Math.max(1, scale * 0.9);
  for (const offset of [-step, 0, step]) { pen.beginPath(); pen.moveTo(offset - 1, step + 1); pen.lineTo(offset + step + 1, -1); pen.stroke(); }
  return ctx.createPattern(tile, "repeat");
};

/** Draws one block, or a tile, as a cell with a level, for the map by block and the one by request. */
function paintCell(ctx, { x, y, side, scale, pool, block, focus, isMine, hatch, mark }) {
  const { refs, sums, fill, cached, blockSize } = pool, count = refs[block], round = side >= 12 * scale ? side * 0.16 : 0;
  ctx.beginPath();
  if (round) ctx.roundRect(x, y, side, side, round); else ctx.rect(x, y, side, side);
  ctx.fillStyle = !count && cached[block] ? palette.cached : palette.free;
  ctx.fill();
  if (!count) {
    if (cached[block]) { ctx.globalAlpha = focus ? 0.45 : 1; ctx.fillStyle = hatch; ctx.fill(); ctx.globalAlpha = 1; }
    return;
  }
  const isFaded = focus && !isMine;
  ctx.globalAlpha = isFaded ? palette.dim : 1;
  ctx.fillStyle = isMine ? ownerColour(focus.key).css : count > 1 ? palette.shared : ownerColour(sums[block]).css;
  if (fill[block] >= blockSize) ctx.fill();
  else {
    ctx.globalAlpha *= 0.28;
    ctx.fill();
    ctx.globalAlpha = isFaded ? palette.dim : 1;
    const level = Math.round(side * fill[block] / blockSize);
    ctx.save(); ctx.clip(); ctx.fillRect(x, y + side - level, side, level); ctx.restore();
  }
  const text = mark || (count > 1 ? brief(count) : "");
  if (text && side >= 11 * scale) {
    ctx.font = `600 ${Math.min(side * 0.56, side * 1.5 / Math.max(2, text.length), 15 * scale)}px Inter, system-ui, sans-serif`;
    ctx.textAlign = "center"; ctx.textBaseline = "middle";
    ctx.fillStyle = fill[block] < blockSize / 2 ? palette.ink : isMine || count === 1 ? "#14181d" : palette["on-shared"];
    ctx.fillText(text, x + side / 2, y + side / 2 + scale * 0.6);
  }
  ctx.globalAlpha = 1;
}
