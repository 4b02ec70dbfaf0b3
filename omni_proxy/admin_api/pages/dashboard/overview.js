/* The header, problems with the button that fixes each, and the figures of the last minute. */
function paint() {
  const fleet = last.fleet ?? [];
  const able = fleet.filter(takes).length;
  const [word, kind] = last.leaving ? ["Shutting down: takes no new requests", "warn"]
    : last.reason === "paused" ? ["Not ready: all workers are PAUSED", "bad"]
    : !able ? [fleet.length ? "Not ready: no worker takes requests" : "Not ready: there is no worker", "bad"]
    : able < fleet.length ? [`Serving with ${able} of ${fleet.length} workers`, "warn"]
    : [`Serving with all ${one(able, "worker")}`, "ok"];
  say($("state"), word);
  dress($("state"), kind);
  say($("link"), "live · " + clock(last.at));
  mark($("link"), "title", utc(last.at));
  say($("reader"), last.reader?.name ? `${last.reader.name}, role ${last.reader.role}` : "");
  document.title = `${able}/${fleet.length} up · omni-proxy`;
  const slow = slowOnes(fleet);
  paintAlerts(fleet, able, slow);
  paintTiles(fleet, able);
  paintFleet(fleet, slow);
  dropReport(fleet);
  paintProxies();
  paintCharts();
  paintWeights(fleet);
  paintConfig();
  paintCallers();
  paintEnds();
  paintPlayground(fleet);
  permit($("add"), "operate");
  say($("foot"), [last.version && `omni-proxy ${last.version}`, last.pid && `pid ${last.pid}`, known(last.uptime_secs) && `up ${ago(last.uptime_secs)}`, `times of ${Intl.DateTimeFormat().resolvedOptions().timeZone}`].filter(Boolean).join(" · "));
}

function paintAlerts(fleet, able, slow) {
  const all = [];
  const add = (kind, head, rest, ...buttons) => all.push([kind, head, rest, buttons]);
  const reload = last.last_reload ?? {};
  if (last.leaving) add("warn", "The proxy is shutting down", "it finishes requests in flight");
  if (!fleet.length) add("bad", "There is no worker", "add one here, or with omni-proxy workers add URL", ["Add a worker", "operate", () => openAdding()]);
  if (reload.error) add("bad", "The last reload was refused", firstProblem(reload.error) + "; what ran before still runs");
  if (last.state_error) add("bad", "Changes made here can't be saved", last.state_error);
  const paused = new Map();
  for (const worker of fleet.filter(isPaused)) paused.set(pauseWords(worker.paused), (paused.get(pauseWords(worker.paused)) ?? 0) + 1);
  for (const [words, number] of paused) add("bad", `PAUSED: ${number} of ${one(fleet.length, "worker")}`, `${words}${words ? "; " : ""}Continue ends it, and so does omni-proxy weights continue`, ["Continue", "weights", continueAll]);
  const out = fleet.filter((worker) => !isPaused(worker)).map((worker) => [worker, ...standing(worker)]).filter(([, , , isOut]) => isOut);
  out.sort((a, b) => (b[2] === "bad") - (a[2] === "bad"));
  for (const [worker, name, kind] of out.slice(0, 5)) {
    const uncertain = worker.held_by?.includes("uncertain");
    const button = worker.disabled ? ["Enable", "operate", () => setDisabled(worker, false)] : uncertain ? ["Resolve", "weights", resolveAll] : null;
    const who = worker.disabled && !worker.in_flight && kind !== "bad" ? byWhom(worker) : "";
    add(kind, `${short(worker.url)} is out`, who ? `${name} ${who}` : (worker.why || name).replace(NOISE, ""), ...button ? [button] : []);
  }
  if (out.length > 5) add("warn", `${out.length - 5} more are out`, "");
  const silent = fleet.filter(isSilent);
  for (const worker of silent.slice(0, 5)) add("warn", `${short(worker.url)} is silent`, `${count(worker.in_flight)} in flight, and nothing has come from it for ${ago(worker.silent_secs)}`);
  if (silent.length > 5) add("warn", `${silent.length - 5} more are silent`, "");
  const serving = [...slow.values()].filter(({ worker }) => !standing(worker)[2]).sort((a, b) => b.times - a.times);
  for (const each of serving.slice(0, 5)) {
    add("warn", `${short(each.worker.url)} is slow`, each.text, ["Details", "read", () => showWorker(each.worker.id)]);
  }
  if (serving.length > 5) add("warn", `${serving.length - 5} more are slow`, "");
  const failed = recentSum("errors", 60), ended = recentSum("requests", 60);
  if (failed >= 3 && failed * 100 >= ended) add("bad", "Requests fail", `${count(failed)} of ${count(ended)} in the last minute${usualFailure()}`);
  if (last.cluster && !last.cluster.connected) add("bad", "The store of the cluster is lost", `${last.cluster.error ?? "connecting"}; figures are of this proxy alone`);
  const versions = new Set([last.version, ...peersNow().map((peer) => peer.version).filter(Boolean)]);
  if (versions.size > 1) add("warn", "The proxies have different versions", [...versions].join(", "));
  const refused = last.refused_without_key_last_minute ?? 0;
  if (refused) add("warn", "Requests are refused", `${one(refused, "request")} without a right key ${refused === 1 ? "was" : "were"} refused in the last minute`);
  for (const group of byModel(fleet.filter((worker) => worker.routable && known(worker.weight_version)))) {
    const labels = new Set(group.map((worker) => worker.weight_version));
    if (labels.size > 1 && !rollingOut()) add("warn", `The workers${group[0].model ? ` of ${group[0].model}` : ""} have different weights`, [...labels].join(", "));
  }
  const waiting = last.admission?.waiting;
  if (waiting) add("warn", `${one(waiting, "request")} ${waiting === 1 ? "waits" : "wait"}`, able ? "for a turn" : "for a worker");
  if (rollingOut()) add("blue", `Rollout to ${rollingOut().weight_version}: ${rollingOut().state.replace("_", " ")}`, rolloutWords(rollingOut()), ...rolloutButtons());
  else if (last.weights?.operation) add("blue", "A weight operation is under way", operationWords(last.weights.operation));
  if (last.weights?.sync?.owner) add("blue", "A trainer has a group", syncWords(last.weights.sync), ["Abort", "weights", abortSync]);
  if (!all.length) add("ok", "No problems", fleet.length === 1 ? "the worker takes requests" : `all ${fleet.length} workers take requests`);
  const order = ["bad", "warn", "blue", "ok"];
  all.sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  const tall = $("attention").offsetHeight;
  const before = new Map([...$("alerts").children].map((it) => [it.firstChild.textContent, it]));
  all.forEach(([kind, head, rest, buttons], index) => {
    const it = before.get(head) ?? make("li", "", make("b", "", head), make("span"), make("span", "ends"));
    before.delete(head);
    dress(it, kind);
    say(it.children[1], rest ? ": " + rest : "");
    it.acts = buttons.map(([, , act]) => act);
    fill(it.lastChild, buttons.map(([word]) => word), () => buttons.map(([word], at) => pressed(word, "", () => it.acts[at]())));
    buttons.forEach(([, role], at) => permit(it.lastChild.children[at], role));
    if ($("alerts").children[index] !== it) $("alerts").insertBefore(it, $("alerts").children[index] ?? null);
  });
  for (const it of before.values()) it.remove();
  if ($("attention").offsetHeight !== tall) movedAt = performance.now();
}
/* The most frequent failure of the last minute. */
function usualFailure() {
  const causes = new Map();
  for (const end of last.recent_ends ?? []) {
    if (endKind(end) !== "bad" || seconds(end.at) < seconds(last.at) - 60) continue;
    const cause = [String(end.end).replaceAll("_", " "), end.status >= 500 && end.status, [end.prefill, end.worker].filter(Boolean).map(short).join(" › "), end.error].filter(Boolean).join(", ");
    causes.set(cause, (causes.get(cause) ?? 0) + 1);
  }
  const [most] = [...causes].sort(([, a], [, b]) => b - a);
  return most ? `; most often: ${most[0]}` : "";
}
function firstProblem(error) {
  const problem = error.problems?.[0];
  if (!problem) return error.message ?? plain(error);
  const more = error.problems.length > 1 ? `, and ${error.problems.length - 1} more` : "";
  return `${problem.line ? `line ${problem.line}: ` : ""}${problem.path}: ${problem.reason}${problem.hint ? ` (${problem.hint})` : ""}${more}`;
}

const tiles = new Map();
cleaners.push(() => tiles.clear());
empties("alerts", "tiles", "foot", "reader");
function tile(name, value, kind = "", hint = "") {
  let it = tiles.get(name);
  if (!it) {
    it = make("dd");
    $("tiles").append(make("div", "", make("dt", "", name), it));
    tiles.set(name, it);
  }
  say(it, value);
  mark(it, "title", hint || value);
  dress(it, kind);
}
function recentSum(name, secs) {
  const from = seconds(last.at) - secs;
  return points.filter((point) => point.at > from).reduce((sum, point) => sum + (point[name] ?? 0), 0);
}
function paintTiles(fleet, able) {
  const now = points.at(-1) ?? {};
  const errors = everywhere(recentSum("errors", 60), "errors_last_minute");
  const minute = points.filter((point) => known(point.first_p50_ms) && point.at > seconds(last.at) - 60);
  tile("Workers in use", `${able} of ${fleet.length}`, able === fleet.length && able ? "" : able ? "warn" : "bad");
  tile("Requests/s (10 s)", count(everywhere(recentSum("requests", 10) / Math.min(10, Math.max(points.length, 1)), "requests_per_sec")));
  tile("Errors (1 min)", count(errors), errors ? "bad" : "");
  tile("In flight", count(everywhere(last.admission?.inflight ?? now.in_flight, "in_flight")));
  const waiting = everywhere(last.admission?.waiting, "waiting");
  tile("Waiting", count(waiting), waiting ? "warn" : "");
  tile("First token p50", minute.length ? millis(median(minute.map((point) => point.first_p50_ms))) : "–");
  tile("First token p99", minute.length ? millis(Math.max(...minute.map((point) => point.first_p99_ms))) : "–");
  const gaps = fleet.map((worker) => worker.minute?.between_p50_ms).filter(known);
  tile("Between tokens", gaps.length ? millis(median(gaps)) : "–");
  const tokens = fleet.map(allTokens).filter(known), prompts = fleet.map((worker) => worker.minute?.input_tokens_per_sec).filter(known);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  tile("Tokens/s out", tokens.length ? count(sum(tokens)) : "–", "", last.usage_metrics ? prompts.length ? `${count(sum(prompts))} of prompts` : "" : "counted with [server] usage_metrics");
  const matched = last.policy?.matched_ratio;
  tile("Policy", last.policy?.name ?? "–", "word", known(matched) ? `${Math.round(100 * matched)} % of all prompt text was in its prefix tree` : "");
}

