// Asks /v1/status every two seconds and draws it. Rates of counters are differences between two answers.

import { element, lineChart } from "./charts.js";

const EVERY_S = 2, PATIENCE_S = 10, NUM_SLOTS = 150, FEW_SLOTS = 30, WINDOW = 5; // latencies are over the last WINDOW answers
const KEY = "csattn-api-key";
const $ = (id) => document.getElementById(id);

const charts = {
  ttft: lineChart("Time to first token", seconds),
  tpot: lineChart("Time per token", seconds),
  load: lineChart("Requests", plain),
  fidelity: lineChart("Fidelity of what was read", percent),
};
const history = { ttft: [[], []], tpot: [[], []], load: [[], []], fidelity: [[], []] };
let answers = [], timer = null, asking = new AbortController(), drawnAt = null;
const drawn = {}; // what a table shows, as JSON: it is rebuilt only if that changes, so that selected text stays selected

$("charts").append(...Object.values(charts).map((chart) => chart.card));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  if (!/^[!-~]+$/.test(key)) return refuseKey("A key consists of printable ASCII characters without spaces.");
  sessionStorage.setItem(KEY, key);
  ask();
});
document.addEventListener("visibilitychange", () => document.hidden || ask());
ask();

async function ask() {
  clearTimeout(timer);
  asking.abort(); // of two requests under way, the older could be answered last
  const mine = asking = new AbortController();
  const key = sessionStorage.getItem(KEY);
  try {
    const reply = await replyTo(key, AbortSignal.any([mine.signal, AbortSignal.timeout(1000 * PATIENCE_S)]));
    const said = await reply.json().catch((error) => { if (error.name !== "SyntaxError") throw error; });
    if (mine.signal.aborted) return;
    if (reply.status === 401) return askForKey(key);
    if (!reply.ok || !said) throw new Error(said?.error?.message ?? `The reply is not from csattn; a proxy may have sent it (status ${reply.status}).`);
    show(said);
  } catch (error) {
    if (mine.signal.aborted) return;
    setState("failed", "no answer", `${why(error)}${drawnAt ? ` The figures below are from ${drawnAt}.` : ""}`);
  }
  if (!document.hidden) timer = setTimeout(ask, 1000 * EVERY_S);
}

function replyTo(key, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  return fetch("v1/status", { headers, cache: "no-store", signal });
}

function why(error) {
  if (error.name === "TimeoutError") return `The service has not answered for ${PATIENCE_S} s.`;
  return error.name === "TypeError" ? "The service cannot be reached." : error.message;
}

function askForKey(key) {
  sessionStorage.removeItem(KEY);
  $("key-form").hidden = false;
  document.querySelector("main").hidden = true;
  drawnAt = null;
  setState("", "locked", "");
  refuseKey(key ? "The service does not know this key." : "");
}

function refuseKey(why) {
  $("key-error").textContent = why;
  $("key").focus();
}

function show(status) {
  $("key-form").hidden = true;
  document.querySelector("main").hidden = false;
  $("model").textContent = status.model;
  $("version").textContent = `version ${status.version}`;
  setState(status.ready ? "ready" : "building", status.ready ? "ready" : "not ready", status.ready ? "" : status.why);
  // a restarted service counts from zero: earlier answers cannot be compared
  const before = answers.at(-1)?.status;
  if (before && Object.entries(status.histograms).some(([name, now]) => now.count < (before.histograms[name]?.count ?? 0))) answers = [];
  const at = performance.now() / 1000;
  // without an answer, and while the tab was hidden, curves have a gap instead of a shorter past
  if (answers.length) skip(Math.round((at - answers.at(-1).at) / EVERY_S) - 1);
  answers.push({ status, at });
  answers = answers.slice(-1 - WINDOW);
  drawnAt = new Date().toLocaleTimeString();
  showTiles(status);
  showCharts(status);
  showContexts(status.contexts);
  showWorkers(status.workers);
}

function showTiles(status) {
  const { numbers } = status;
  const { ttft, tpot } = status.histograms;
  const hits = share(numbers.slot_hits, numbers.slot_lookups);
  const found = share(numbers.cached_tokens, numbers.prompt_tokens);
  const tiles = [
    ["Running", plain(numbers.running ?? numbers.open), numbers.queued === undefined ? "" : `${plain(numbers.queued)} waiting`],
    ["Tokens per s", rate("new_tokens"), numbers.new_tokens === undefined ? "" : `${plain(numbers.new_tokens)} since start`],
    ["First token", seconds(quantile(ttft, 0.5)), `99 % within ${seconds(quantile(ttft, 0.99))}`],
    ["Each token", seconds(quantile(tpot, 0.5)), `99 % within ${seconds(quantile(tpot, 0.99))}`],
    ["Prompts found", percent(found), `${bytes(numbers.kept_bytes)} kept in memory and on disk`],
    ["Context KV", bytes(numbers.kv_bytes), numbers.index_bytes === undefined ? "" : `index ${bytes(numbers.index_bytes)}`],
    ["Slot cache hits", percent(hits), "rows on the device"],
  ];
  const absent = [hits === null && "Slot cache hits", found === null && "Prompts found"];
  const shown = tiles.filter(([name]) => !absent.includes(name));
  $("tiles").replaceChildren(...shown.map(([name, value, note]) => {
    const tile = element("div", "tile");
    tile.append(element("div", "name", name), element("div", "value", value), element("div", "note", note));
    return tile;
  }));
}

function showCharts(status) {
  const { numbers, contexts } = status;
  const ttft = recent((one) => one.histograms.ttft), tpot = recent((one) => one.histograms.tpot);
  remember("ttft", [quantile(ttft, 0.5), quantile(ttft, 0.95)]);
  remember("tpot", [quantile(tpot, 0.5), quantile(tpot, 0.95)]);
  remember("load", [numbers.running ?? numbers.open ?? null, numbers.queued ?? null]);
  remember("fidelity", ["recall", "mass"].map((name) => fidelityOf(name, contexts)));
  const slots = Math.max(FEW_SLOTS, history.load[0].length); // the first minute fills the width; later it grows
  const draw = (name, names, colours, lowest, highest) => charts[name].draw(
    names.map((title, index) => ({ name: title, colour: colours[index], values: history[name][index] })),
    slots, lowest, highest, EVERY_S * slots,
  );
  draw("ttft", ["median", "95th percentile"], ["one", "two"], 0);
  draw("tpot", ["median", "95th percentile"], ["one", "two"], 0);
  draw("load", ["running", "waiting"], ["one", "two"], 0);
  draw("fidelity", ["recall", "attention mass"], ["three", "one"], 0, 1);
}

function showContexts(contexts) {
  $("no-contexts").hidden = contexts.length > 0;
  if (!changed("contexts", contexts)) return;
  $("contexts").replaceChildren(...contexts.map((context) => {
    const row = element("tr");
    const state = element("td");
    state.append(element("span", `pill ${context.state}`, context.state));
    if (context.state === "building") state.append(" ", bar(context.progress, "building"), percent(context.progress));
    if (context.state !== "ready" && context.what) state.append(element("small", "", context.what));
    const tokens = element("td", "number", context.num_tokens === null ? "–" : plain(context.num_tokens));
    const held = element("td", context.held_by.length ? "" : "quiet", context.held_by.join(", ") || "–");
    row.append(element("td", "id", context.model), state, tokens, held);
    for (const name of ["recall", "mass"]) {
      const mean = share(context.fidelity[name]?.sum, context.fidelity[name]?.count);
      const cell = element("td", mean === null ? "quiet" : "share", mean === null ? "–" : "");
      if (mean !== null) cell.append(bar(mean, ""), percent(mean));
      row.append(cell);
    }
    return row;
  }));
}

function showWorkers(workers) {
  if (!changed("workers", workers)) return;
  $("workers").replaceChildren(...workers.map((worker) => {
    const row = element("tr"), state = element("td"), answers = worker.since !== null;
    state.append(element("span", `pill ${answers ? "ready" : "failed"}`, answers ? "answers" : "no answer"));
    for (const failed of worker.failed_builds) {
      state.append(element("small", "", `context of a prompt's ${plain(failed.num_tokens)} tokens not built: ${failed.why}; not tried again for ${plain(Math.ceil(failed.retry_in_s))} s`));
    }
    row.append(element("td", "id", worker.name), state);
    const cells = [`${plain(worker.running)} of ${plain(worker.slots)}`, plain(worker.contexts), bytes(worker.held_bytes),
      worker.budget_bytes === null ? "none" : bytes(worker.budget_bytes)];
    row.append(...cells.map((text) => element("td", "number", answers ? text : "–")));
    return row;
  }));
}

function setState(className, text, why) {
  if (!changed("state", [className, text, why])) return; // else screen readers would announce it at every answer
  $("state").className = `pill ${className}`;
  $("state").textContent = text;
  $("why").textContent = why;
  document.title = `${[$("model").textContent, text].filter(Boolean).join(", ")} – csattn`;
}

function changed(name, shown) {
  const before = drawn[name];
  drawn[name] = JSON.stringify(shown);
  return drawn[name] !== before;
}

function skip(slots) {
  for (let left = Math.min(slots, NUM_SLOTS); left > 0; left -= 1) {
    for (const [name, series] of Object.entries(history)) remember(name, series.map(() => null));
  }
}

function remember(name, values) {
  values.forEach((value, index) => {
    history[name][index].push(value);
    history[name][index] = history[name][index].slice(-NUM_SLOTS);
  });
}

function bar(value, className) {
  const outer = element("span", `bar ${className}`), inner = element("i");
  inner.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  outer.append(inner);
  return outer;
}

// The part of a histogram within the window: {count, sum, buckets: [[bound, how many up to it]]}.
function recent(pick) {
  const now = pick(answers.at(-1).status), old = pick(answers[0].status);
  if (!now || !old) return null;
  return {
    count: now.count - old.count,
    sum: now.sum - old.sum,
    buckets: now.buckets.map(([bound, upTo], index) => [bound, upTo - (old.buckets[index]?.[1] ?? 0)]),
  };
}

// Interpolates linearly between a bucket's bounds; beyond the last bound, returns that bound.
function quantile(histogram, wanted) {
  if (!histogram || histogram.count <= 0) return null;
  const rank = wanted * histogram.count;
  let below = 0, from = 0;
  for (const [bound, upTo] of histogram.buckets) {
    if (upTo >= rank) return from + ((bound - from) * (rank - below)) / Math.max(upTo - below, 1e-9);
    [below, from] = [upTo, bound];
  }
  return from;
}

function fidelityOf(name, contexts) {
  const total = (list, part) => list.reduce((sum, one) => sum + (one.fidelity[name]?.[part] ?? 0), 0);
  const old = answers[0].status.contexts;
  return share(total(contexts, "sum") - total(old, "sum"), total(contexts, "count") - total(old, "count"));
}

function rate(name) {
  const [old, now] = [answers[0], answers.at(-1)];
  const grown = now.status.numbers[name] - old.status.numbers[name];
  return now.at > old.at && grown >= 0 ? (grown / (now.at - old.at)).toFixed(1) : "–";
}

function share(part, whole) {
  return whole > 0 && part >= 0 ? part / whole : null;
}

function seconds(value) {
  if (value === null) return "–";
  if (value === 0) return "0";
  if (value < 0.0995) return `${digits(1000 * value)}\u00a0ms`;
  return value < 1 ? `${Math.round(1000 * value)}\u00a0ms` : `${digits(value)}\u00a0s`;
}

function percent(value) {
  return value === null ? "–" : `${digits(100 * value)}\u00a0%`;
}

function bytes(value) {
  if (value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${digits(value)}\u00a0${units[unit]}`;
}

function plain(value) {
  return value === undefined || value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
}

function digits(value) {
  return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}
