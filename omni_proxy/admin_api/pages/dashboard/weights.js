/* Weights: the running and waiting operations with their callers, and the last ones. */
empties("weights-now", "weights-past", "weights-says");
const STEPS = ["waiting", "draining", "recording", "calling", "reading", "verifying", "restoring"];
function operations() {
  const weights = last.weights ?? {}, now = seconds(last.at);
  const past = (weights.history ?? []).map((each) => ({ to: seconds(each.ended_at), from: seconds(each.ended_at) - each.secs }));
  return weights.operation ? past.concat({ from: now - weights.operation.age_secs, to: now }) : past;
}
function paintWeights(fleet) {
  const weights = last.weights;
  const uncertain = Object.entries(weights?.uncertain ?? {});
  const journal = weights?.journal ?? {};
  const sync = weights?.sync?.owner ? weights.sync : null;
  const rollout = rollingOut();
  const any = weights && (weights.operation || sync || rollout || weights.waiting?.length || weights.history?.length || uncertain.length || weights.weight_epoch || journal.error);
  show($("weights"), Boolean(any));
  if (!any) return;
  say($("weights-says"), weights.weight_epoch ? `published: ${weights.weight_version ?? "without a label"}, epoch ${weights.weight_epoch}` : "no update through this proxy yet");
  const running = weights.operation;
  const key = [last.reader, running, weights.waiting, uncertain, journal, sync, rollout];
  fill($("weights-now"), key, () => [
    ...(journal.error ? [make("div", "box bad", "The journal can't be written: " + journal.error)] : []),
    ...uncertain.map(([url, why]) => make("div", "box bad", make("b", "", short(url)), ` is uncertain: ${plain(why)}. Once you have verified its weights: `, allowed("Resolve", "weights", resolveAll), " or omni-proxy weights resolve")),
    ...(sync ? [nowSyncing(sync)] : []),
    ...(rollout ? [nowRolling(rollout)] : []),
    ...(running ? [nowRunning(running)] : []),
    ...(weights.waiting ?? []).map((each) => make("div", "box", make("b", "", each.path), ` waits for ${ago(each.age_secs)}`, make("span", "quiet", each.caller ? ` · ${each.caller}` : ""))),
  ]);
  const past = [...(weights.history ?? [])].reverse();
  show($("weights-past"), past.length > 0);
  fill($("weights-past"), past.map((each) => each.id), () => past.map(finished));
}
function allowed(word, role, act) {
  const it = pressed(word, "", act);
  permit(it, role);
  return it;
}
function rollingOut() {
  const rollout = last.weights?.rollout;
  return rollout && !["none", "succeeded", "failed", "cancelled"].includes(rollout.state) ? rollout : null;
}
function rolloutWords(rollout) {
  const busy = (rollout.workers ?? []).filter((each) => each.step).map((each) => `${each.step} ${short(each.worker)}`);
  return [`${rollout.updated} of ${one(rollout.total, "worker")} updated`, ...busy, rollout.waits_for, rollout.cause].filter(Boolean).join("; ");
}
function nowRolling(rollout) {
  const bad = rollout.state === "rolling_back";
  return make("div", bad ? "box bad" : "box", make("b", "", `Rollout to ${rollout.weight_version}`), ` is ${rollout.state.replace("_", " ")}, begun `, time(rollout.begun_at),
    make("span", "quiet", rollout.caller ? ` · ${rollout.caller}` : ""), make("div", "small", rolloutWords(rollout)),
    make("div", "small", (rollout.workers ?? []).map((each) => `${short(each.worker)} ${each.state}`).join(" · ")),
    make("div", "tools", ...rolloutButtons().map(([word, role, act]) => allowed(word, role, act))));
}
const SYNC_STEPS = ["joining", "grouped", "arming", "armed", "committing", "verifying"];
/* The caller and the age of an operation. */
const begunWords = (each) => `${each.caller ? ` by ${each.caller}` : ""} for ${ago(each.age_secs)}`;
const operationWords = (operation) => `${operation.path}${begunWords(operation)}, ${operation.step}`;
const syncWords = (sync) => `${sync.owner.group_name} at ${sync.owner.master}${begunWords(sync.owner)}, ${sync.state}`;
function nowSyncing(sync) {
  const at = SYNC_STEPS.indexOf(sync.state), owner = sync.owner;
  const asked = (sync.members ?? []).filter((each) => each.progress === "asked").map((each) => short(each.member));
  const steps = make("ol", "steps", ...SYNC_STEPS.map((step, index) => make("li", index < at ? "done" : index === at ? "now" : "", step)));
  return make("div", "box", make("b", "", `Sync of group ${owner.group_name}`), ` at ${owner.master}, begun ${ago(owner.age_secs)} ago: ${sync.state} for ${ago(sync.step_secs)}`,
    make("span", "quiet", owner.caller ? ` · ${owner.caller}` : ""), steps,
    make("div", "small", asked.length ? `waits for ${asked.join(", ")}` : `${one((sync.members ?? []).length, "member")}, ${one(sync.buckets ?? 0, "bucket")} announced`),
    ...(sync.members ?? []).filter((each) => !["ok", "updating", "joining"].includes(each.standing)).map((each) => make("div", "bad", `${short(each.member)} is ${each.standing}`)),
    make("div", "tools", allowed("Abort", "weights", abortSync), make("span", "quiet small", "omni-proxy weights abort")));
}
function nowRunning(running) {
  const at = STEPS.indexOf(running.step);
  const answered = (running.workers ?? []).filter((each) => each.progress === "done" || each.progress === "failed").length;
  const steps = make("ol", "steps", ...STEPS.map((step, index) => make("li", index < at ? "done" : index === at ? "now" : "", step)));
  return make("div", "box", make("b", "", running.path), ` runs for ${ago(running.age_secs)}, ${answered} of ${one((running.workers ?? []).length, "worker")} answered`, make("span", "quiet", running.caller ? ` · ${running.caller}` : ""), steps,
    last.weights.sync?.owner ? null : make("div", "quiet small", "It ends by itself: what workers load can't be called back."),
    ...reasonLines("bad", (running.workers ?? []).filter((each) => each.reason)));
}
/* One line per reason: most workers fail for the same one. */
const NAMES_SHOWN = 4;
function reasonLines(kind, workers) {
  const reasons = new Map();
  for (const each of workers) {
    const reason = each.reason ?? "failed";
    reasons.set(reason, [...(reasons.get(reason) ?? []), short(each.worker)]);
  }
  return [...reasons].map(([reason, names]) => {
    const more = names.length - NAMES_SHOWN;
    return make("div", kind, `${names.slice(0, NAMES_SHOWN).join(", ")}${more > 0 ? ` and ${more} more` : ""}: ${reason}`);
  });
}
function finished(each) {
  const failed = (each.workers ?? []).filter((worker) => worker.progress === "failed");
  const result = each.success ? "done" : `failed, ${each.http_status}`;
  const took = ` in ${millis(each.secs * 1000)}, ${one((each.workers ?? []).length, "worker")}`;
  return make("li", each.success ? "ok" : "bad",
    make("div", "", make("span", "quiet", time(each.ended_at), " "), make("b", "", each.path), " ", make("b", each.success ? "ok" : "bad", result), took,
      make("span", "quiet", [known(each.weight_epoch) && each.weight_epoch && ` · epoch ${each.weight_epoch}`, each.caller && ` · ${each.caller}`].filter(Boolean).join(""))),
    !each.success && each.message ? make("div", "small", plain(each.message)) : null,
    ...reasonLines("small", failed));
}

