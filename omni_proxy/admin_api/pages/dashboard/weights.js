/* Weights: the running and queued operations with their callers, and past ones. */
clearOnSignOut("current-operations", "past-operations", "weights-summary");
const OPERATION_STEPS = ["waiting", "draining", "recording", "calling", "reading", "verifying", "restoring"];
function operationTimes() {
  const weights = snapshot.weights ?? {}, now = toSeconds(snapshot.at);
  const history = (weights.history ?? []).map((each) => ({ to: toSeconds(each.ended_at), from: toSeconds(each.ended_at) - each.secs }));
  return weights.operation ? history.concat({ from: now - weights.operation.age_secs, to: now }) : history;
}
function renderWeights() {
  const weights = snapshot.weights;
  const uncertain = Object.entries(weights?.uncertain ?? {});
  const journal = weights?.journal ?? {};
  const sync = weights?.sync?.owner ? weights.sync : null;
  const rollout = activeRollout();
  const hasContent = weights && (weights.operation || sync || rollout || weights.waiting?.length || weights.history?.length || uncertain.length || weights.weight_epoch || journal.error);
  setVisible($("weights"), Boolean(hasContent));
  if (!hasContent) return;
  setText($("weights-summary"), weights.weight_epoch ? `published: ${weights.weight_version ?? "without a label"}, epoch ${weights.weight_epoch}` : "no update through this proxy yet");
  const running = weights.operation;
  const key = [snapshot.reader, running, weights.waiting, uncertain, journal, sync, rollout];
  replaceIfChanged($("current-operations"), key, () => [
    ...(journal.error ? [createElement("div", "box error", "The state journal can't be written: " + journal.error)] : []),
    ...uncertain.map(([workerUrl, reason]) => createElement("div", "box error", createElement("b", "", shortUrl(workerUrl)), ` is uncertain: ${toText(reason)}. Once you have verified its weights: `, permittedButton("Resolve", "weights", resolveAll), " or omni-proxy weights resolve")),
    ...(sync ? [syncBox(sync)] : []),
    ...(rollout ? [rolloutBox(rollout)] : []),
    ...(running ? [operationBox(running)] : []),
    ...(weights.waiting ?? []).map((each) => createElement("div", "box", createElement("b", "", each.path), ` queued for ${formatDuration(each.age_secs)}`, createElement("span", "muted", each.caller ? ` · ${each.caller}` : ""))),
  ]);
  const history = [...(weights.history ?? [])].reverse();
  setVisible($("past-operations"), history.length > 0);
  replaceIfChanged($("past-operations"), history.map((each) => each.id), () => history.map(pastOperation));
}
function permittedButton(label, role, action) {
  const element = createButton(label, "", action);
  setPermission(element, role);
  return element;
}
function activeRollout() {
  const rollout = snapshot.weights?.rollout;
  return rollout && !["none", "succeeded", "failed", "cancelled"].includes(rollout.state) ? rollout : null;
}
function rolloutText(rollout) {
  const steps = (rollout.workers ?? []).filter((each) => each.step).map((each) => `${each.step} ${shortUrl(each.worker)}`);
  return [`${rollout.updated} of ${pluralize(rollout.total, "worker")} updated`, ...steps, rollout.waits_for, rollout.cause].filter(Boolean).join("; ");
}
function rolloutBox(rollout) {
  const isRollback = rollout.state === "rolling_back";
  return createElement("div", isRollback ? "box error" : "box", createElement("b", "", `Rollout to ${rollout.weight_version}`), ` is ${rollout.state.replace("_", " ")}, started `, createTime(rollout.begun_at),
    createElement("span", "muted", rollout.caller ? ` · ${rollout.caller}` : ""), createElement("div", "small", rolloutText(rollout)),
    createElement("div", "small", (rollout.workers ?? []).map((each) => `${shortUrl(each.worker)} ${each.state}`).join(" · ")),
    createElement("div", "toolbar", ...rolloutButtons().map(([label, role, action]) => permittedButton(label, role, action))));
}
const SYNC_STEPS = ["joining", "grouped", "arming", "armed", "committing", "verifying"];
/* The caller and the age of an operation. */
const startedText = (each) => `${each.caller ? ` by ${each.caller}` : ""} for ${formatDuration(each.age_secs)}`;
const operationText = (operation) => `${operation.path}${startedText(operation)}, ${operation.step}`;
const syncText = (sync) => `${sync.owner.group_name} at ${sync.owner.master}${startedText(sync.owner)}, ${sync.state}`;
function syncBox(sync) {
  const at = SYNC_STEPS.indexOf(sync.state), owner = sync.owner;
  const asked = (sync.members ?? []).filter((each) => each.progress === "asked").map((each) => shortUrl(each.member));
  const steps = createElement("ol", "steps", ...SYNC_STEPS.map((step, index) => createElement("li", index < at ? "done" : index === at ? "current" : "", step)));
  return createElement("div", "box", createElement("b", "", `Sync of group ${owner.group_name}`), ` at ${owner.master}, started ${formatDuration(owner.age_secs)} ago: ${sync.state} for ${formatDuration(sync.step_secs)}`,
    createElement("span", "muted", owner.caller ? ` · ${owner.caller}` : ""), steps,
    createElement("div", "small", asked.length ? `waiting for ${asked.join(", ")}` : `${pluralize((sync.members ?? []).length, "member")}, ${pluralize(sync.buckets ?? 0, "bucket")} announced`),
    ...(sync.members ?? []).filter((each) => !["ok", "updating", "joining"].includes(each.standing)).map((each) => createElement("div", "error", `${shortUrl(each.member)} is ${each.standing}`)),
    createElement("div", "toolbar", permittedButton("Abort", "weights", abortSync), createElement("span", "muted small", "omni-proxy weights abort")));
}
function operationBox(running) {
  const at = OPERATION_STEPS.indexOf(running.step);
  const answered = (running.workers ?? []).filter((each) => each.progress === "done" || each.progress === "failed").length;
  const steps = createElement("ol", "steps", ...OPERATION_STEPS.map((step, index) => createElement("li", index < at ? "done" : index === at ? "current" : "", step)));
  return createElement("div", "box", createElement("b", "", running.path), ` running for ${formatDuration(running.age_secs)}, ${answered} of ${pluralize((running.workers ?? []).length, "worker")} answered`, createElement("span", "muted", running.caller ? ` · ${running.caller}` : ""), steps,
    snapshot.weights.sync?.owner ? null : createElement("div", "muted small", "It can't be aborted, because workers already load the weights."),
    ...reasonLines("error", (running.workers ?? []).filter((each) => each.reason)));
}
/* One line per reason: most workers fail for the same one. */
const MAX_NAMES = 4;
function reasonLines(kind, workers) {
  const reasons = new Map();
  for (const each of workers) {
    const reason = each.reason ?? "failed";
    reasons.set(reason, [...(reasons.get(reason) ?? []), shortUrl(each.worker)]);
  }
  return [...reasons].map(([reason, names]) => {
    const more = names.length - MAX_NAMES;
    return createElement("div", kind, `${names.slice(0, MAX_NAMES).join(", ")}${more > 0 ? ` and ${more} more` : ""}: ${reason}`);
  });
}
function pastOperation(each) {
  const failed = (each.workers ?? []).filter((worker) => worker.progress === "failed");
  const result = each.success ? "done" : `failed, ${each.http_status}`;
  const duration = ` in ${formatMillis(each.secs * 1000)}, ${pluralize((each.workers ?? []).length, "worker")}`;
  return createElement("li", each.success ? "ok" : "error",
    createElement("div", "", createElement("span", "muted", createTime(each.ended_at), " "), createElement("b", "", each.path), " ", createElement("b", each.success ? "ok" : "error", result), duration,
      createElement("span", "muted", [hasValue(each.weight_epoch) && each.weight_epoch && ` · epoch ${each.weight_epoch}`, each.caller && ` · ${each.caller}`].filter(Boolean).join(""))),
    !each.success && each.message ? createElement("div", "small", toText(each.message)) : null,
    ...reasonLines("small", failed));
}

