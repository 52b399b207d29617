"use strict";
// The state of the cache at one moment: pools of blocks, requests with their tables, and the steps.

const MAX_LOG = 6000;            // events that are stored for the texts
const MAX_ENDED = 200;           // requests that are listed after their end
const MAX_POINTS = 120;          // of a sparkline
const POINT_EVERY = 0.5;         // seconds
const MAX_EFFECTS = 960;         // stored for the map until it is drawn
const MAX_STEPS = 4000;
const MAX_PIECES = 400;          // of one prompt
const MAX_LOST = 200;            // evicted blocks whose position in the prefix tree is stored

/** The blocks of one pool. Owners are counted and their keys added up, so the sum of a single owner is its key. */
class Pool {
  constructor(size, blockSize) {
    this.size = size; this.blockSize = blockSize;
    this.refs = new Int32Array(size); this.sums = new Float64Array(size);
    this.fill = new Uint16Array(size).fill(blockSize); this.cached = new Uint8Array(size);
    this.before = new Int32Array(size);   // of a cached block: one more than the block before it; 0: it begins a sequence
    this.born = new Uint32Array(size);    // the order in which blocks became cached
    this.births = 0; this.lost = [];      // {block, before, at} of evicted ones
    this.used = 0; this.entries = 0; this.kept = 0; this.empty = 0;   // kept: free, but reusable; empty: slots of owned blocks
    this.high = 0;                        // blocks from this id on have never been used
    this.isDirty = new Uint8Array(size); this.dirty = []; this.version = 0;
  }
  touch(block) {
    if (block >= this.high) this.high = block + 1;
    if (!this.isDirty[block]) { this.isDirty[block] = 1; this.dirty.push(block); }
    this.version++;
  }
  clean() { for (const block of this.dirty) this.isDirty[block] = 0; this.dirty.length = 0; }
  check(block) { if (!(block >= 0 && block < this.size)) throw new Error(`it names block ${block} of a pool with ${this.size} blocks`); }
  own(block, key) {
    this.check(block);
    if (this.refs[block]++ === 0) { this.used++; this.empty += this.blockSize - this.fill[block]; this.kept -= this.cached[block]; }
    this.sums[block] += key; this.entries++; this.touch(block);
  }
  disown(block, key) {
    this.check(block);
    if (--this.refs[block] === 0) { this.used--; this.empty -= this.blockSize - this.fill[block]; this.kept += this.cached[block]; }
    this.sums[block] -= key; this.entries--; this.touch(block);
  }
  setFill(block, tokens) {
    const before = this.fill[block], now = this.refs[block] > 1 ? Math.max(before, tokens) : tokens;
    if (now === before) return;
    if (this.refs[block]) this.empty += before - now;
    this.fill[block] = now; this.touch(block);
  }
  store(block, before) {
    this.check(block);
    if (!this.cached[block] && !this.refs[block]) this.kept++;
    this.cached[block] = 1; this.before[block] = before; this.born[block] = this.births++; this.touch(block);
  }
  drop(block) {
    this.check(block);
    if (!this.cached[block]) return;
    if (!this.refs[block]) this.kept--;
    this.cached[block] = 0; this.touch(block);
  }
  lose(block, at) {
    this.lost.push({ block, before: this.blockBefore(block), at });
    if (this.lost.length > MAX_LOST) this.lost.shift();
    this.drop(block);
  }
  /** Returns the cached block before a cached one; -1: it begins a sequence, or the one before was evicted. */
  blockBefore(block) {
    const before = this.before[block] - 1;
    return before >= 0 && this.cached[before] && this.born[before] <= this.born[block] ? before : -1;
  }
}

/** All block tables at one moment, from a snapshot and the records after it. */
class State {
  constructor(snapshot, earlier) {
    const config = this.config = snapshot.config;
    this.about = snapshot.about; this.epoch = snapshot.epoch; this.number = snapshot.id; this.time = snapshot.time;
    this.gauges = snapshot.gauges; this.log = snapshot.history;
    this.pools = config.pools.map((size, g) => new Pool(size, config.spans[g]));
    this.hosts = config.hosts.map((size, g) => new Pool(size, config.spans[g]));
    this.requests = new Map(); this.families = new Map(); this.ended = []; this.effects = []; this.steps = [];
    const isSame = earlier && earlier.epoch === snapshot.epoch && earlier.time <= snapshot.time;
    this.series = snapshot.series || (isSame ? earlier.series : []);
    for (const event of this.log) this.recall(event);
    for (const reported of snapshot.requests) {
      const known = this.requests.get(reported.key);
      const request = this.meet(reported.key, reported.id, reported.prompt, reported.limit, reported.sample, reported.family);
      Object.assign(request, { state: reported.state, generated: reported.generated, stored: reported.stored, report: reported.report });
      [request.drafted, request.accepted] = reported.drafts || [0, 0];
      [request.arrived, request.ran, request.spoke] = reported.times;
      if (known) Object.assign(request, { phases: known.phases, pieces: known.pieces });
      else for (const [kind, at] of [["queued", request.arrived], ["prefill", request.ran], ["decode", request.spoke]]) if (at !== null) request.phases.push({ kind, at });
      request.given = config.windows.map((_, g) => reported.given[g] || 0);
      reported.tables.forEach((runs, g) => eachBlock(runs, block => { request.tables[g].push(block); this.pools[g].own(block, reported.key); }));
      reported.hosts.forEach((runs, g) => eachBlock(runs, block => { request.hosts[g].push(block); this.hosts[g].own(block, reported.key); }));
    }
    snapshot.cached.forEach((runs, g) => {
      const before = snapshot.before ? expand(snapshot.before[g]) : [];
      let i = 0;
      eachBlock(runs, block => this.pools[g].store(block, before[i++] || 0));
      this.pools[g].born.fill(0); this.pools[g].births = 1;
      if (snapshot.highs) this.pools[g].high = Math.max(this.pools[g].high, Math.min(this.pools[g].size, snapshot.highs[g]));
    });
    for (const request of this.requests.values()) this.refill(request, 0);
    for (const pool of [...this.pools, ...this.hosts]) pool.clean();
  }

  meet(key, id, prompt, limit, sample, family = key) {
    const groups = this.config.windows;
    const request = {
      key, id, prompt, limit, sample, family, state: "waiting", generated: 0, stored: 0, report: null, reason: null, error: null,
      arrived: null, ran: null, spoke: null, over: null, given: groups.map(() => 0), tables: groups.map(() => []), hosts: groups.map(() => []),
      drafted: 0, accepted: 0,  // draft tokens
      left: [],     // {table, given} of each group: the last blocks that were freed
      phases: [],   // {kind, at}: queued, prefill, decode, preempted, swapped
      pieces: [],   // {at, seconds, from, count} of its prompt, as steps computed them
    };
    this.requests.set(key, request);
    if (!this.families.has(family)) this.families.set(family, new Set());
    this.families.get(family).add(key);
    return request;
  }
  forget(key) {
    const request = this.requests.get(key), members = this.families.get(request?.family);
    this.requests.delete(key);
    members?.delete(key);
    if (members && !members.size) this.families.delete(request.family);
  }

  /** Applies an event from before the snapshot. Of ended requests, nothing else is known. */
  recall(event) {
    const [what, at, key] = event;
    if (what === "arrived") { if (!this.requests.has(key)) this.arrive(event); }
    else if (what === "ended") this.end(event);
    else if (what === "step") this.step(event);
    else if (isLife(what) && this.requests.has(key)) this.live(event, this.requests.get(key));
  }
  arrive([, at, key, id, prompt, limit, sample, family]) {
    const request = this.meet(key, id, prompt, limit, sample, family);
    request.arrived = at;
    request.phases.push({ kind: "queued", at });
  }
  live([what, at, , detail, generated], request) {
    if (what === "ran") Object.assign(request, { state: "running", ran: at, report: detail });
    else if (what === "first_token") request.spoke = at;
    else if (what === "preempted") Object.assign(request, { state: detail, generated });
    else request.state = "running";
    const kind = what === "ran" ? "prefill" : what === "first_token" ? "decode" : what === "resumed" ? (request.spoke === null ? "prefill" : "decode") : detail === "swapped" ? "swapped" : "preempted";
    request.phases.push({ kind, at });
  }
  end([, at, key, id, reason, prompt, generated, error, drafted = 0, accepted = 0]) {
    if (key < 0) return;
    const request = this.requests.get(key) || this.meet(key, id, prompt, prompt + generated, 0);
    Object.assign(request, { state: "ended", reason, generated, error, drafted, accepted, over: at });
    this.ended.push(key);
    while (this.ended.length > MAX_ENDED) this.forget(this.ended.shift());
  }
  step([, at, number, seconds, prompt, decoded, waiting, hold, pieces]) {
    this.steps.push({ at, number, seconds, prompt, decoded, waiting, hold });
    if (this.steps.length > MAX_STEPS * 1.25) this.steps = this.steps.slice(-MAX_STEPS);
    for (const [key, from, count] of pieces) {
      const request = this.requests.get(key);
      if (request && request.pieces.length < MAX_PIECES) request.pieces.push({ at, seconds, from, count });
    }
  }

  /** Applies a record. If it is shown, stores its effects for the map. */
  apply(record, isShown) {
    if (!isShown) this.effects = null;
    else this.effects ||= [];
    for (const event of record.events) this.happen(event);
    for (const [key, generated, stored, ...rest] of record.requests) {
      const request = this.requests.get(key);
      if (!request) continue;
      const from = Math.min(request.stored, stored);
      const given = rest.splice(0, this.pools.length), [drafted = 0, accepted = 0] = rest;  // older recordings have no drafts
      Object.assign(request, { generated, stored, given, drafted, accepted });
      this.refill(request, from);
    }
    this.log.push(...record.events);
    if (this.log.length > MAX_LOG * 1.25) this.log = this.log.slice(-MAX_LOG);
    this.number = record.id; this.time = record.time; this.gauges = record.gauges;
    this.sample(record.time);
  }

  happen(event) {
    const what = event[0], pool = this.pools[event[2]];
    switch (what) {
      case "arrived": this.arrive(event); return;
      case "ended": this.end(event); return;
      case "step": this.step(event); return;
      case "evicted": eachBlock(event[3], block => { pool.lose(block, event[1]); this.show("evict", event[2], block); }); return;
      case "forgotten": eachBlock(event[3], block => pool.drop(block)); return;
      case "cleared": pool.cached.forEach((was, block) => was && pool.drop(block)); return;
      case "stored": {
        const before = event[6] ? expand(event[6]) : [];
        let i = 0, last = -1;
        eachBlock(event[4], block => { pool.store(block, before[i] ?? last + 1); i++; last = block; });
        return;
      }
    }
    const request = this.requests.get(event[isLife(what) ? 2 : 3]);
    if (!request) return;
    if (isLife(what)) this.live(event, request);
    else this.move(event, request);
  }

  /** Applies an event that changes the tables of a request. */
  move(event, request) {
    const [what, , g] = event, pool = this.pools[g], host = this.hosts[g], key = request.key, table = request.tables[g];
    const take = (runs, isNew) => {
      if (!table.length) request.stored = 0;  // unknown until a record reports it
      eachBlock(runs, block => {
        table.push(block); pool.own(block, key);
        if (isNew) { pool.setFill(block, 0); this.show("alloc", g, block); }
      });
    };
    const leave = () => { for (const block of table) pool.disown(block, key); table.length = 0; };
    const leaveHost = () => { for (const block of request.hosts[g]) host.disown(block, key); request.hosts[g] = []; };
    switch (what) {
      case "allocated": take(event[4], true); break;
      case "shared": request.given[g] = 0; take(event[4], false); break;
      case "forked": request.given[g] = 0; take(event[5], false); break;
      case "copied": {
        const [src, dst] = [event[4], event[5]];
        table[table.lastIndexOf(src)] = dst;
        pool.disown(src, key); pool.own(dst, key); pool.setFill(dst, pool.fill[src]);
        this.show("copy", g, dst, src, key);
        break;
      }
      case "freed": {
        const count = countOf(event[4]);
        if (count >= table.length) {
          request.left[g] = { table: [...table], given: request.given[g] };
          leave(); request.given[g] = 0;
        }
        else if (this.config.kinds[g] === "states") {  // a state that was kept for others may have been added after a later one
          eachBlock(event[4], block => { table.splice(table.indexOf(block), 1); pool.disown(block, key); });
        }
        else { for (const block of table.splice(0, count)) pool.disown(block, key); request.given[g] += count; }
        break;
      }
      case "swapped_out":
        for (const block of table) this.show("swap", g, block);
        leave();
        eachBlock(event[5], block => { request.hosts[g].push(block); host.own(block, key); host.setFill(block, host.blockSize); this.show("hostswap", g, block); });
        break;
      case "swapped_in":
        for (const block of request.hosts[g]) this.show("hostswap", g, block);
        leaveHost();
        eachBlock(event[4], block => { table.push(block); pool.own(block, key); this.show("swap", g, block); });
        this.refill(request, 0);
        break;
      case "host_freed": leaveHost(); break;
    }
  }

  /** Sets the fill of the request's blocks, from the block of token `from` on. */
  refill(request, from) {
    request.tables.forEach((table, g) => {
      const size = this.pools[g].blockSize;
      const start = Math.max(0, Math.floor(from / size) - request.given[g]);
      for (let i = start; i < table.length; i++) {
        this.pools[g].setFill(table[i], Math.max(0, Math.min(size, request.stored - (i + request.given[g]) * size)));
      }
    });
  }

  show(kind, group, block, src, key) {
    if (this.effects && this.effects.length < MAX_EFFECTS) this.effects.push({ kind, group, block, src, key });
  }

  usage() {
    const size = this.config.block_size, all = this.pools.filter((_, g) => this.config.kinds[g] === "attention");
    const sum = name => all.reduce((total, pool) => total + pool[name], 0), used = sum("used");
    return {
      num_blocks: sum("size"), used_blocks: used, logical_blocks: sum("entries"), cached_blocks: sum("kept"),
      filled_slots: used * size - sum("empty"), wasted_slots: sum("empty"), shared_blocks: sum("entries") - used,
      host_blocks: this.hosts.reduce((total, pool, g) => total + (this.config.kinds[g] === "attention" ? pool.used : 0), 0),
    };
  }

  /** Adds a point to the sparklines, if it is time for one. */
  sample(time) {
    const last = this.series[this.series.length - 1], gauges = this.gauges;
    if (last && time - last.time < POINT_EVERY) return;
    const usage = this.usage(), since = last ? time - last.time : 1;
    const grown = name => last ? Math.max(0, gauges[name] - last.gauges[name]) : 0;
    this.series.push({
      time, gauges: { ...gauges }, used: usage.used_blocks / usage.num_blocks, kept: usage.cached_blocks / usage.num_blocks,
      saved: usage.shared_blocks, hit: gauges.asked_tokens ? gauges.cached_tokens / gauges.asked_tokens : 0, running: gauges.running,
      waiting: gauges.waiting, rate: grown("generated_tokens") / since, prompt: grown("prompt_tokens") / since, copies: grown("copies"),
      evictions: grown("evictions"), preemptions: grown("preemptions"), swaps: grown("swapped_out") + grown("swapped_in"),
    });
    if (this.series.length > MAX_POINTS) this.series.shift();
  }

  /** Returns the state as a snapshot, from which it can be restored. */
  save() {
    const live = [...this.requests.values()].filter(request => request.state !== "ended");
    const cached = this.pools.map(pool => { const blocks = []; pool.cached.forEach((on, block) => on && blocks.push(block)); return blocks; });
    return JSON.stringify({
      kind: "snapshot", id: this.number, time: this.time, epoch: this.epoch, about: this.about, config: this.config, gauges: this.gauges,
      requests: live.map(r => ({
        key: r.key, id: r.id, sample: r.sample, family: r.family, state: r.state, prompt: r.prompt, limit: r.limit, generated: r.generated, stored: r.stored,
        report: r.report, times: [r.arrived, r.ran, r.spoke], given: r.given, drafts: [r.drafted, r.accepted], tables: r.tables.map(shorten), hosts: r.hosts.map(shorten),
      })),
      cached: cached.map(shorten), before: cached.map((blocks, g) => shorten(blocks.map(block => this.pools[g].blockBefore(block) + 1))),
      highs: this.pools.map(pool => pool.high), series: this.series, history: this.log,
    });
  }

  /** Returns the owners of a block, with its index in their tables. */
  ownersOf(isHost, group, block) {
    const owners = [], pool = (isHost ? this.hosts : this.pools)[group];
    if (!pool.refs[block]) return owners;
    for (const request of this.requests.values()) {
      const at = (isHost ? request.hosts : request.tables)[group].indexOf(block);
      if (at >= 0) owners.push({ request, index: at + request.given[group] });
      if (owners.length === pool.refs[block]) break;
    }
    return owners;
  }

  /** Returns a request's short name: R42, or R42.1 to R42.4 if its prompt has several samples. */
  label(key) {
    const request = this.requests.get(key);
    if (!request) return `R${key + 1}`;
    const isOneOfMany = request.sample > 0 || this.families.get(request.family)?.size > 1;
    return `R${request.family + 1}${isOneOfMany ? `.${request.sample + 1}` : ""}`;
  }

  /** Returns the reason why requests waited between two moments: the one that applied for the longest time. */
  holdBetween(from, to) {
    const spent = {};
    for (let i = this.steps.length - 1; i >= 0 && this.steps[i].at >= from; i--) {
      const { at, seconds, hold } = this.steps[i];
      if (hold && at - seconds <= to) spent[hold] = (spent[hold] || 0) + Math.max(0.0001, seconds);
    }
    return Object.keys(spent).sort((a, b) => spent[b] - spent[a])[0] || null;
  }
}
const LIFE = new Set(["ran", "first_token", "preempted", "resumed"]);
const isLife = what => LIFE.has(what);
const HOLDS = { blocks: "pool full", slots: "all slots taken", swapped: "pool full: requests on the host return first", budget: "the step's token budget was used up" };
