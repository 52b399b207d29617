"use strict";
// Helpers: elements, numbers and times as text, and lists of block ids with shortened runs.

const $ = id => document.getElementById(id);
const DIGITS = new Intl.NumberFormat("en");
const fmt = value => DIGITS.format(Math.round(value));
const percent = (part, whole) => whole ? (100 * part / whole).toFixed(part / whole < 0.0995 && part ? 1 : 0) + "%" : "0%";
const plural = (count, word) => `${fmt(count)} ${word}${count === 1 ? "" : "s"}`;
const shortName = name => name.length > 18 ? name.slice(0, 9) + "…" + name.slice(-7) : name;
const brief = count => count < 10_000 ? fmt(count) : count < 1e6 ? `${(count / 1000).toFixed(count < 1e5 ? 1 : 0)}k` : `${(count / 1e6).toFixed(1)}M`;
const sumOf = tables => tables.reduce((total, table) => total + table.length, 0);

/** Creates an element. Texts are set as text, never as markup, because they may come from a client. */
function make(tag, options, ...children) {
  const made = document.createElement(tag), { data, css, attributes, ...rest } = options || {};
  Object.assign(made, rest);
  Object.assign(made.dataset, data || {});
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  for (const [name, value] of Object.entries(css || {})) made.style.setProperty(name, value);
  made.append(...children);
  return made;
}
function put(node, text) { if (node.textContent !== text) node.textContent = text; }

const duration = seconds => seconds < 0.0995 ? `${(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0)} ms` : seconds < 9.95 ? `${seconds.toFixed(1)} s` : seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
const ago = seconds => seconds < 0.05 ? "now" : `−${duration(Math.max(0.1, seconds))}`;
function clock(wall) {
  const date = new Date(wall * 1000), two = value => String(value).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}.${Math.floor(date.getMilliseconds() / 100)}`;
}

/** Calls visit for each block of a list with shortened runs: after an id, −2k means k more in ascending order. */
function eachBlock(runs, visit) {
  let block = 0;
  for (const value of runs) {
    if (value >= 0) visit(block = value);
    else for (let left = -value >> 1, step = value & 1 ? -1 : 1; left > 0; left--) visit(block += step);
  }
}
function expand(runs) { const blocks = []; eachBlock(runs, block => blocks.push(block)); return blocks; }
function countOf(runs) { let count = 0; for (const value of runs) count += value >= 0 ? 1 : -value >> 1; return count; }
function holds(runs, wanted) {
  let block = 0;
  for (const value of runs) {
    if (value >= 0) { block = value; if (block === wanted) return true; continue; }
    const end = block + (value & 1 ? -1 : 1) * (-value >> 1);
    if (wanted >= Math.min(block, end) && wanted <= Math.max(block, end)) return true;
    block = end;
  }
  return false;
}
function shorten(blocks) {
  const short = [];
  let last = -2, step = 0, count = 0;
  for (const block of blocks) {
    if (count && block - last === step) count++;
    else if (!count && short.length && Math.abs(block - last) === 1) { step = block - last; count = 1; }
    else { if (count) short.push(-2 * count - (step < 0 ? 1 : 0)); short.push(block); count = 0; }
    last = block;
  }
  if (count) short.push(-2 * count - (step < 0 ? 1 : 0));
  return short;
}
