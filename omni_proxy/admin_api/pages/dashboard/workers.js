/* The table of workers: searched, sorted, grouped by model, and no longer than a screen or two. Only visible rows are built,
   and they are reused, so that a fleet of hundreds costs as little as a small one. */
const SHOWN = 25, SHOWN_OF_MORE = 15;
const rows = new Map(), sparks = new Map(), opened = new Set(), unfolded = new Set();
const view = { by: "", down: false, more: 0 };
let longest = 1;  // longest time to the first token of all workers
/* When rows last moved: a click just after that was meant for another button. */
let movedAt = -Infinity;
const SETTLE_MS = 600;
const COLUMNS = [
  ["name", "Worker", "w-name", (worker) => worker.display_id ?? worker.url],
  ["state", "State, and why", "w-state", (worker) => trouble(worker)],
  ["load", "In flight", "w-load num", (worker) => worker.in_flight],
  ["rate", "Req/s", "w-rate num", allRate],
  ["first", "First token p50 · p99", "w-first", (worker) => worker.first_p50_ms],
  ["tokens", "Tokens/s", "w-tokens num", allTokens],
  ["cache", "Cache", "w-cache num", (worker) => worker.minute?.cache_hit_ratio],
  ["errors", "Errors", "w-err num", allErrors],
  ["weights", "Weights", "w-weights", (worker) => worker.weight_version],
];
const NUMERIC = new Set(["state", "load", "rate", "first", "tokens", "cache", "errors"]);

$("heads").append(...COLUMNS.map(([name, words, className]) => {
  const head = make("th", className, pressed(words, "head", () => sortBy(name)));
  head.scope = "col";
  head.dataset.by = name;
  return head;
}), Object.assign(make("th", "w-acts", "Actions"), { scope: "col" }));
function sortBy(name) {
  if (view.by !== name) Object.assign(view, { by: name, down: NUMERIC.has(name) });
  else if (view.down === NUMERIC.has(name)) view.down = !view.down;
  else view.by = "";
  if (last) paint();
}
for (const id of ["find", "only"]) $(id).addEventListener("input", () => { view.more = 0; if (last) paint(); });
$("by-model").addEventListener("change", () => last && paint());
$("sort").append(new Option("sort: as configured", ""), ...COLUMNS.map(([name, words]) => new Option(`sort: ${words.toLowerCase()}`, name)));
$("sort").addEventListener("change", () => { Object.assign(view, { by: $("sort").value, down: NUMERIC.has($("sort").value) }); if (last) paint(); });
empties("rows", "fleet-says", "more");
cleaners.push(() => { rows.clear(); sparks.clear(); opened.clear(); unfolded.clear(); view.more = 0; });

/* Higher is more urgent. */
function trouble(worker) {
  const [, kind, out] = standing(worker);
  return (out ? 4 : 0) + (kind === "bad" ? 8 : kind === "warn" ? 2 : 0) + (isSilent(worker) ? 2 : 0) + (allErrors(worker) ? 1 : 0);
}
/* All text of a worker's row except figures. */
function found(worker, words, slow) {
  const text = [worker.url, worker.display_id, worker.model, worker.role, worker.origin, standing(worker)[0], slowWords(worker, slow), whyWords(worker), worker.why, worker.health, worker.overloaded && "overloaded", worker.last_error, worker.weight_version, byWhom(worker), under(worker), ...worker.adapters ?? []].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}
function wanted(fleet, slow) {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean), only = $("only").checked;
  const list = fleet.filter((worker) => found(worker, words, slow) && (!only || trouble(worker) || slow.has(worker.id)));
  const column = COLUMNS.find(([name]) => name === view.by);
  /* In a large fleet workers with problems come first. */
  const value = column?.[3] ?? (fleet.length > SHOWN ? (worker) => trouble(worker) + (slow.has(worker.id) ? 2 : 0) : null);
  if (!value) return list;
  const down = column ? view.down : true;
  const order = (a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return list.map((worker) => [worker, value(worker)]).sort(([, a], [, b]) => {
    if (!known(a) || !known(b)) return known(b) - known(a);
    return down ? order(b, a) : order(a, b);
  }).map(([worker]) => worker);
}
function paintFleet(fleet, slow) {
  const most = (fleet.length > SHOWN ? SHOWN_OF_MORE : SHOWN) + view.more;
  longest = Math.max(1, ...fleet.map((each) => each.first_p99_ms ?? each.first_p50_ms ?? 0));
  const list = wanted(fleet, slow), grouped = $("by-model").checked && !$("by-model-box").hidden;
  const models = new Set(fleet.map((worker) => worker.model ?? ""));
  show($("by-model-box"), models.size > 1);
  show($("only-box"), fleet.length > 8);
  for (const head of $("heads").children) if (head.dataset.by) mark(head, "aria-sort", head.dataset.by !== view.by ? "none" : view.down ? "descending" : "ascending");
  if ($("sort").value !== view.by) $("sort").value = view.by;
  const lines = [];
  if (grouped) for (const group of byModel(list)) lines.push(...groupLines(group, slow));
  else lines.push(...list.slice(0, most).flatMap((worker) => workerLines(worker, slow)));
  place(lines);
  const shown = new Set(lines.map((line) => line.dataset.worker));
  for (const id of rows.keys()) if (!shown.has(id)) { rows.delete(id); if (!fleet.some((worker) => worker.id === id)) { sparks.delete(id); opened.delete(id); } }
  const left = grouped ? 0 : list.length - Math.min(list.length, most);
  fill($("more"), [left > 0, Math.min(left, 50), list.length], () => left > 0 ? [
    pressed(`Show ${Math.min(left, 50)} more`, "", () => { view.more += 50; paint(); }), pressed(`Show all ${list.length}`, "", () => { view.more = Infinity; paint(); }),
  ] : []);
  const some = list.length < fleet.length || left ? `${list.length - left} of ${fleet.length} shown` : "";
  say($("fleet-says"), !fleet.length ? "none" : [some, inCluster() ? "last minute, all proxies; first token and cache of this one" : "figures of the last minute"].filter(Boolean).join("; "));
  show($("nobody"), !list.length);
  say($("nobody"), fleet.length ? "No worker matches." : "No worker yet.");
}
/* Rows in this order; a row that keeps its place is not touched. */
function place(lines) {
  const keep = new Set(lines), body = $("rows");
  for (const it of [...body.children]) if (!keep.has(it)) { it.remove(); movedAt = performance.now(); }
  let next = body.firstElementChild;
  for (const it of lines) {
    if (it === next) { next = next.nextElementSibling; continue; }
    body.insertBefore(it, next);
    movedAt = performance.now();
  }
}
const groups = new Map();
function groupLines(group, slow) {
  const model = group[0].model ?? "";
  if (!groups.has(model)) {
    const it = make("tr", "group"), cell = make("th"), says = make("span", "quiet small");
    const button = pressed("", "fold", () => { if (!unfolded.delete(model)) unfolded.add(model); paint(); });
    cell.colSpan = COLUMNS.length + 1;
    cell.append(button, " ", says);
    it.append(cell);
    groups.set(model, { it, button, says });
  }
  const { it, button, says } = groups.get(model), open = unfolded.has(model) || group.length <= 5;
  say(button, `${open ? "▾" : "▸"} ${model || "any model"}`);
  mark(button, "aria-expanded", open);
  const out = group.filter((worker) => !takes(worker)).length, times = group.map((worker) => worker.first_p50_ms).filter(known);
  const sum = (value) => group.reduce((total, worker) => total + (value(worker) ?? 0), 0), errors = sum(allErrors);
  say(says, [one(group.length, "worker"), out && `${out} out`, `${count(sum((worker) => worker.in_flight))} in flight`, `${count(sum(allRate))} req/s`, times.length && `first token p50 ${millis(median(times))}`, errors && one(errors, "error")].filter(Boolean).join(" · "));
  return [it, ...open ? group.flatMap((worker) => workerLines(worker, slow)) : []];
}
function workerLines(worker, slow) {
  if (!rows.has(worker.id)) rows.set(worker.id, newRow(worker.id));
  const row = rows.get(worker.id);
  paintRow(row, worker, slow);
  if (!opened.has(worker.id)) return [row.it];
  row.detail ??= newDetail(row);
  paintDetail(row, worker, slow);
  return [row.it, row.detail];
}
const slowWords = (worker, slow) => isSilent(worker) ? `silent for ${ago(worker.silent_secs)}` : slow.has(worker.id) ? `slow, ${slow.get(worker.id).times.toFixed(1)} ×` : "";
function under(worker) {
  const adapters = worker.adapters ?? [];
  return [worker.role && worker.role !== "regular" && worker.role, worker.model, adapters.length && `adapters ${adapters.filter((each) => !each.includes(":")).join(", ") || adapters.join(", ")}`, worker.launch?.state && worker.launch.state !== "ready" && `process ${worker.launch.state}`, worker.launch?.restarts && one(worker.launch.restarts, "restart"), worker.kv_mode && worker.kv_mode !== "off" && `KV ${worker.kv_mode}`].filter(Boolean).join(" · ") || worker.origin;
}
function whyWords(worker) {
  const who = worker.disabled && worker.disabled_by?.by;
  return isPaused(worker) ? `${pauseWords({ ...worker.paused, at: null })}; omni-proxy weights continue`
    : [reason((worker.why ?? "").replace(NOISE, ""), standing(worker)[0]), who && !(worker.why ?? "").includes(who) && `by ${who}`].filter(Boolean).join(" · ");
}
function paintRow(row, worker, slow) {
  const [name, kind, out] = standing(worker);
  const slowText = slowWords(worker, slow), isSlow = Boolean(slowText);
  row.worker = worker;
  dress(row.it, [isSlow && kind === "ok" ? "warn" : kind, out && "out", isSlow && "slow"].filter(Boolean).join(" "));
  say(row.name, worker.display_id ?? short(worker.url));
  mark(row.name, "aria-expanded", opened.has(worker.id));
  mark(row.name, "title", `${worker.url}: details`);
  say(row.origin, under(worker));
  say(row.badge, name);
  dress(row.badge, "badge " + kind);
  show(row.slow, isSlow);
  say(row.slow, slowText);
  const begun = isPaused(worker) ? worker.paused.at : "state_since" in worker ? worker.state_since : worker.since;
  say(row.since, begun ? `for ${ago(seconds(last.at) - seconds(begun))}` : "");
  mark(row.since, "title", begun ? `since ${moment(begun)} (${utc(begun)})` : "");
  const why = whyWords(worker);
  say(row.why, why);
  mark(row.why, "title", why);
  say(row.load, worker.max_inflight ? `${count(worker.in_flight)} of ${count(worker.max_inflight)}` : count(worker.in_flight));
  say(row.queue, known(worker.minute?.waiting) ? `queue ${count(worker.minute.waiting)}` : worker.sessions ? one(worker.sessions, "session") : "");
  mark(row.load, "title", ofThis(worker, count(worker.in_flight - (worker.elsewhere?.in_flight ?? 0))));
  say(row.rate, count(allRate(worker)));
  mark(row.rate, "title", ofThis(worker, count(worker.rate)));
  say(row.errors, count(allErrors(worker)));
  mark(row.errors, "title", ofThis(worker, count(worker.errors)));
  dress(row.errors, allErrors(worker) ? "bad" : "");
  say(row.first, known(worker.first_p50_ms) ? `${millis(worker.first_p50_ms)} · ${millis(worker.first_p99_ms)}` : "no answers lately");
  dress(row.first, known(worker.first_p50_ms) ? "says" : "says quiet small");
  row.body.style.width = (100 * (worker.first_p50_ms ?? 0)) / longest + "%";
  row.tail.style.width = (100 * (worker.first_p99_ms ?? 0)) / longest + "%";
  spark(row.spark, worker);
  say(row.tokens, count(allTokens(worker)));
  say(row.prompts, known(worker.minute?.input_tokens_per_sec) ? `${count(worker.minute.input_tokens_per_sec)} in` : "");
  say(row.cache, share(worker.minute?.cache_hit_ratio));
  say(row.label, worker.weight_version ?? "–");
  mark(row.label, "title", worker.weight_version ?? "not known");
  say(row.epoch, worker.weight_epoch ? `epoch ${worker.weight_epoch}` : "");
  say(row.switch, worker.disabled || worker.drain ? "Enable" : "Disable");
  for (const each of ["switch", "drain", "revive", "remove"]) mark(row[each], "aria-label", `${row[each].textContent} ${row.name.textContent}`);
  permit(row.switch, "operate");
  permit(row.drain, "operate", !worker.drain);
  permit(row.revive, "operate", worker.health !== "healthy");
  permit(row.remove, "operate");
}
function newRow(id) {
  const row = { id };
  const part = (name, tag, className) => row[name] = make(tag, className);
  const button = (name, word, className, act) => row[name] = pressed(word, className, (event, it) => {
    const byHand = event.detail > 0;
    if (byHand && performance.now() - movedAt < SETTLE_MS) report("The list had just moved. Press again if you meant this worker.", "warn");
    else act(row.worker, it);
  });
  const head = make("th", "", row.name = pressed("", "name one", () => toggle(id)), part("origin", "div", "quiet small one"));
  head.scope = "row";
  row.spark = draw("svg", { class: "spark", viewBox: "0 0 72 22", "aria-hidden": "true" });
  row.spark.append(draw("path", {}));
  const cells = [
    make("td", "state", make("div", "badges", part("badge", "span", "badge"), part("slow", "span", "badge slow"), part("since", "span", "quiet small")), part("why", "div", "one small")),
    make("td", "num", part("load", "span"), part("queue", "div", "quiet small")),
    make("td", "num", part("rate", "span")),
    make("td", "firsts", make("div", "first", part("first", "span", "says"), row.spark), make("div", "bar", part("tail", "i", "tail"), part("body", "i", "body"))),
    make("td", "num", part("tokens", "span"), part("prompts", "div", "quiet small")),
    make("td", "num", part("cache", "span")),
    make("td", "num", part("errors", "span")),
    make("td", "", part("label", "div", "one"), part("epoch", "div", "quiet small")),
    make("td", "last", make("div", "acts",
      button("switch", "Disable", "switch", flip), button("drain", "Drain", "", drain),
      button("revive", "Revive", "", revive), button("remove", "Remove", "danger", remove))),
  ];
  COLUMNS.slice(2).forEach(([, words], at) => { cells[at + 1].dataset.name = words; });
  row.it = make("tr", "", head, ...cells);
  row.it.dataset.worker = id;
  return row;
}
/* Opens a worker's row, scrolls to it and shows its charts. */
function showWorker(id) {
  opened.add(id);
  $("find").value = "";
  $("only").checked = false;
  unfolded.add(last.fleet.find((worker) => worker.id === id)?.model ?? "");
  if (!rows.has(id)) view.more = Infinity;
  choose(range, id);
  paint();
  rows.get(id)?.it.scrollIntoView({ block: "center" });
  rows.get(id)?.name.focus();
}
function toggle(id) {
  if (!opened.delete(id)) opened.add(id);
  paint();
}
function spark(svg, worker) {
  const values = sparks.get(worker.id) ?? [];
  if (values.at !== last.at) values.push(worker.first_p50_ms ?? null);
  values.at = last.at;
  if (values.length > 120) values.splice(0, values.length - 120);
  sparks.set(worker.id, values);
  const top = Math.max(1, ...values.map((value) => value ?? 0)) * 1.1, step = 70 / 119;
  const from = 71 - (values.length - 1) * step;
  mark(svg.firstChild, "d", trace(values.map((value, at) => [from + at * step, known(value) ? 21 - (20 * value) / top : null])));
}

/* ---- details of a row ---- */
function newDetail(row) {
  const it = make("tr", "detail"), cell = make("td");
  cell.colSpan = COLUMNS.length + 1;
  row.facts = make("div", "columns");
  row.weightField = numberField("Weight", 1, 1000000);
  row.boundField = numberField("Most in flight, 0 for no bound", 0, 1000000);
  const save = pressed("Save", "main", () => setBalance(row.worker, row.weightField.lastChild, row.boundField.lastChild));
  row.save = save;
  cell.append(row.facts, make("div", "tools", row.weightField, row.boundField, save, make("span", "grow"),
    pressed("Charts of it", "", () => { choose(range, row.id); $("traffic").scrollIntoView({ block: "start" }); $("scope").focus(); })));
  it.append(cell);
  it.dataset.worker = row.id;
  return it;
}
function numberField(words, least, most) {
  const input = make("input", "number");
  Object.assign(input, { type: "number", min: least, max: most, step: 1, required: true });
  input.addEventListener("input", () => { input.touched = true; });
  return make("label", "small", words + " ", input);
}
function paintDetail(row, worker, slow) {
  dress(row.detail, ["detail", ...["ok", "warn", "bad", "blue"].filter((each) => row.it.classList.contains(each))].join(" "));
  for (const [field, value] of [[row.weightField, worker.weight], [row.boundField, worker.max_inflight ?? 0]]) {
    if (!field.lastChild.touched && field.lastChild.value !== String(value)) field.lastChild.value = value;
  }
  permit(row.save, "operate");
  const minute = worker.minute ?? {}, load = worker.engine_load, who = byWhom(worker);
  const slowness = worker.slow?.text;
  const key = [worker.url, worker.state_since, who.replace(/for \S+ \S+/, ""), worker.in_flight, worker.routed, worker.failed, worker.rate, worker.elsewhere, minute, load?.waiting, worker.kv_mode, worker.ranks_in_flight, worker.last_error, slowness, holdWords(worker)];
  fill(row.facts, key, () => [
    facts([
      ["URL", worker.url], ["Model", worker.model], ["Adapters", (worker.adapters ?? []).join(", ")], ["Origin", worker.origin],
      ["Leg", worker.role !== "regular" && `${worker.role}${legOf(worker)}`],
      ["Out since", worker.disabled && worker.disabled_by?.at && time(worker.disabled_by.at)], ["By", worker.disabled && worker.disabled_by?.by],
      ["Why", (worker.why ?? "").replace(NOISE, "")], ["Held", holdWords(worker)], ["Last error", (worker.last_error ?? "").replace(NOISE, "")],
    ]),
    facts([
      ["Slow", slowness],
      ["Between tokens, p50", known(minute.between_p50_ms) && millis(minute.between_p50_ms)],
      ["Through this proxy", worker.elsewhere && `${count(worker.in_flight - worker.elsewhere.in_flight)} of ${count(worker.in_flight)} in flight, ${count(worker.rate)} of ${count(allRate(worker))} req/s`],
      ["Prompt tokens/s", known(minute.input_tokens_per_sec) && count(minute.input_tokens_per_sec)],
      ["Engine", load && `${known(load.waiting) ? `${count(load.waiting)} waiting` : ""}${known(load.kv_usage) ? `, KV cache ${share(load.kv_usage)} full` : ""}${load.state !== "ok" ? `, ${load.state}` : ""}`.replace(/^, /, "")],
      ["KV events", worker.kv_mode && worker.kv_mode !== "off" && `${worker.kv_mode}${worker.kv_reason ? `: ${worker.kv_reason}` : ""}`],
      ["Ranks, in flight", (worker.ranks_in_flight ?? []).map((number, at) => `${at}: ${count(number)}`).join(" · ")],
      ["Sessions", worker.sessions], ["Requests since it was added", worker.routed && `${count(worker.routed)}, ${count(worker.failed)} failed`],
    ]),
  ]);
}
/* The worker's cordons, their start, and the operation that each belongs to. */
function holdWords(worker) {
  const weights = last.weights ?? {}, short = (at) => at ? ` since ${moment(at)}` : "";
  const who = { updating: weights.operation ?? weights.sync?.owner, rollout: rollingOut(), paused: worker.paused && { caller: worker.paused.by } };
  return (worker.held_by ?? []).map((name) => `${name}${short(worker.held_since?.[name])}${who[name]?.caller ? ` by ${who[name].caller}` : ""}`).join(", ");
}
/* The partners of a prefill or decode worker. */
function legOf(worker) {
  const other = worker.role === "prefill" ? "decode" : "prefill";
  const partners = (last.fleet ?? []).filter((each) => each.role === other && (each.model ?? "") === (worker.model ?? ""));
  return `; ${partners.length ? `${other}: ${partners.slice(0, 4).map((each) => short(each.url)).join(", ")}${partners.length > 4 ? ` and ${partners.length - 4} more` : ""}` : `no ${other} worker`}`;
}
