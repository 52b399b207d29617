"use strict";
// Recordings: the received snapshots and records, the state at a cursor in them, and files of recordings.

const MAX_RECORDED = 48e6;       // characters of stored records
const CHECKPOINT_EVERY = 400;    // records
const MAX_FILE = 400e6;          // characters
const MAX_BLOCKS = 20e6;         // of an opened recording

class Timeline {
  constructor() { this.clear(); }
  clear() {
    this.items = []; this.size = 0; this.checkpoints = []; this.cursor = -1; this.state = null; this.isFollowing = true; this.isFull = false;
    this.chapters = [];   // {at: index, title, caption}
  }
  get end() { return this.items.length - 1; }
  /** Adds a snapshot or a record. While it is paused, a full recording accepts no more. */
  add(text, parsed) {
    if (this.size + text.length > MAX_RECORDED) {
      if (!this.isFollowing) { this.isFull = true; return; }
      this.trim();
    }
    if (parsed.kind === "snapshot") this.epoch = parsed.epoch;
    this.items.push({ text, wall: this.epoch + parsed.time, isSnapshot: parsed.kind === "snapshot" });
    this.size += text.length;
    if (this.isFollowing) this.step(parsed, true);
  }
  /** Applies the item after the cursor. */
  step(parsed, isShown) {
    const item = this.items[++this.cursor];
    parsed ||= JSON.parse(item.text);
    if (item.isSnapshot) this.state = new State(parsed, this.state);
    else this.state.apply(parsed, isShown);
    const last = this.checkpoints.length ? this.checkpoints[this.checkpoints.length - 1].index : 0;
    if (this.cursor - last >= CHECKPOINT_EVERY) this.checkpoints.push({ index: this.cursor, text: this.state.save() });
  }
  seek(index) {
    index = Math.max(0, Math.min(this.end, index));
    const from = this.cursor <= index && this.state ? this.cursor : -1;
    const checkpoint = this.checkpoints.filter(at => at.index <= index && at.index > from).pop();
    let snapshot = index;
    while (snapshot > from && !this.items[snapshot].isSnapshot) snapshot--;
    if (snapshot > from && !(checkpoint && checkpoint.index > snapshot)) this.cursor = snapshot - 1;
    else if (checkpoint) { this.state = new State(JSON.parse(checkpoint.text)); this.cursor = checkpoint.index; }
    while (this.cursor < index) this.step(null, index - this.cursor <= 2);
  }
  /** Drops the first half: the recording then begins at a checkpoint. */
  trim() {
    const base = this.checkpoints.find(at => at.index > this.end / 2) || { index: this.cursor, text: this.state.save() };
    const item = { text: base.text, wall: this.items[base.index].wall, isSnapshot: true };
    this.items = [item, ...this.items.slice(base.index + 1)];
    this.checkpoints = this.checkpoints.filter(at => at.index > base.index).map(at => ({ ...at, index: at.index - base.index }));
    this.cursor -= base.index;
    this.size = this.items.reduce((total, one) => total + one.text.length, 0);
  }
  /** Returns the chapter at the cursor, or null. */
  chapter() { return this.chapters.findLast(chapter => chapter.at <= this.cursor) || null; }
  export() {
    const chapters = this.chapters.length ? `"chapters":${JSON.stringify(this.chapters)},` : "";
    return `{"format":"quire-inspector","version":1,${chapters}"items":[\n${this.items.map(item => item.text).join(",\n")}\n]}\n`;
  }
}

/** Reads a recording from a file's text, and moves to its beginning. Throws an Error that describes an invalid file. */
function readRecording(text) {
  const foreign = "it was not exported from a block inspector";
  if (!text.trim()) throw new Error("it is empty");
  if (text.length > MAX_FILE) throw new Error(`it has ${fmt(text.length)} characters; at most ${fmt(MAX_FILE)} can be shown`);
  let recording;
  try { recording = JSON.parse(text); }
  catch { throw new Error(text.trimStart().startsWith('{"format":"quire-inspector"') ? "it ends too early or is damaged; export it once more" : foreign); }
  if (recording?.format !== "quire-inspector") throw new Error(foreign);
  if (recording.version !== 1) throw new Error(`it is of version ${recording.version}, and this page reads version 1`);
  const items = recording.items;
  if (!Array.isArray(items) || !items.length) throw new Error("nothing is recorded in it");
  if (items[0]?.kind !== "snapshot") throw new Error("it does not begin with a snapshot, so the state before is unknown");
  const opened = new Timeline();
  opened.isFollowing = false;
  let at = 0;
  try {
    for (const item of items) { checkItem(item); opened.add(JSON.stringify(item), item); at++; }
    for (at = 0; at <= opened.end; at++) opened.seek(at);  // to the end, so that a damaged file is detected now
  } catch (error) {
    const why = error.constructor === Error ? error.message : "a part of it is missing or has a wrong type";
    throw new Error(`record ${at + 1} of ${items.length} cannot be read: ${why}`);
  }
  const chapters = Array.isArray(recording.chapters) ? recording.chapters : [];
  opened.chapters = chapters.filter(one => Number.isInteger(one?.at) && one.at >= 0 && one.at <= opened.end).map(one => ({ at: one.at, title: String(one.title), caption: String(one.caption) }));
  opened.seek(0);
  return opened;
}
function checkItem(item) {
  if (item?.kind !== "snapshot" && item?.kind !== "record") throw new Error(`it is neither a snapshot nor a record but ${JSON.stringify(item?.kind ?? null)}`);
  if (!Number.isFinite(item.time)) throw new Error("it has no time");
  if (item.kind === "record") { if (!Array.isArray(item.events) || !Array.isArray(item.requests) || !item.gauges) throw new Error("it has no events"); return; }
  const sizes = [...item.config.pools, ...item.config.hosts];
  if (!sizes.every(size => Number.isInteger(size) && size >= 0) || sizes.reduce((a, b) => a + b, 0) > MAX_BLOCKS) throw new Error(`its pools have ${JSON.stringify(sizes)} blocks`);
}
