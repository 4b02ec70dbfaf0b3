/* Changes by the operator. Each shows its result in a notification, and asks for confirmation if it can't be undone. */
const NOTIFICATION_SECS = { ok: 8, warning: 8, error: 30 };
let notificationTimer = 0, notificationWorker = null;  // the worker that the notification is about: { id, seen }
/* A notification disappears after some seconds, a failure later; one of a running action or with a button stays until it is
   replaced. */
function notify(text, kind, ...buttons) {
  clearTimeout(notificationTimer);
  notificationWorker = null;
  setText($("notification-text"), text);
  setClass($("notification-text"), kind);
  $("notification-buttons").replaceChildren(...buttons, createButton("Close", "", () => notify("", "")));
  setVisible($("notification"), Boolean(text));
  if (text && NOTIFICATION_SECS[kind] && !buttons.length) notificationTimer = setTimeout(() => notify("", ""), NOTIFICATION_SECS[kind] * 1000);
}
/* A notification about a worker disappears with the worker. */
function dropNotification(fleet) {
  if (!notificationWorker) return;
  const exists = fleet.some((worker) => worker.id === notificationWorker.id);
  if (notificationWorker.seen && !exists) notify("", "");
  else notificationWorker.seen = exists;  // the feed may be older than a worker that was just added
}
clearFunctions.push(() => { notify("", ""); clearTimeout(undoTimer); undoTimer = 0; });
const nameOf = (worker) => shortUrl(worker.url);
const pathOf = (worker) => "workers/" + worker.id;
const JSON_HEADERS = { "Content-Type": "application/json" };
const updateCall = (worker, fields) => ["PUT", pathOf(worker), JSON.stringify(fields), JSON_HEADERS];
const isLastServing = (worker) => takesRequests(worker) && (snapshot.fleet ?? []).filter(takesRequests).length === 1;

/* `actionText`: shown while the action runs; `resultText`: after it succeeded. */
async function runAction(actionText, resultText, ...call) {
  notify(`${actionText} …`, "muted");
  const response = await callApi(...call);
  const at = formatTime(Date.now() / 1000);
  if (response.ok) notify(`${at}: ${resultText}.`, "ok");
  else notify(`${at}: ${actionText} failed: ${response.error}`, "error");
  return response;
}
async function runWorkerAction(worker, button, actionText, resultText, ...call) {
  if (button?.getAttribute("aria-busy") === "true") return null;
  button?.setAttribute("aria-busy", "true");
  const response = await runAction(`${actionText} ${nameOf(worker)}`, `${nameOf(worker)} ${resultText}`, ...call);
  button?.removeAttribute("aria-busy");
  if (!response.ok) notificationWorker = { id: worker.id, seen: false };
  return response;
}
const LAST_WORKER_WARNING = "It is the only worker that takes requests: without it all requests fail or wait.";
async function toggleDisabled(worker, button) {
  const disable = !(worker.disabled || worker.drain);
  if (disable && isLastServing(worker) && !await confirmAction(`Disable ${nameOf(worker)}?`, LAST_WORKER_WARNING, "Disable")) return;
  await setDisabled(worker, disable, button);
}
async function setDisabled(worker, disable, button) {
  await runWorkerAction(worker, button, disable ? "Disabling" : "Enabling", disable ? "is disabled; requests in flight continue" : "is enabled", ...updateCall(worker, { disabled: disable }));
}
async function drainWorker(worker, button) {
  if (isLastServing(worker) && !await confirmAction(`Drain ${nameOf(worker)}?`, LAST_WORKER_WARNING, "Drain")) return;
  await runWorkerAction(worker, button, "Draining", "is draining: it gets no new requests", "POST", pathOf(worker) + "/drain", "{}", JSON_HEADERS);
}
async function reviveWorker(worker, button) {
  await runWorkerAction(worker, button, "Reviving", "was revived: its failures are cleared, and it was probed", ...updateCall(worker, { is_dead: false }));
}
async function saveLimits(worker, weight, limit) {
  if (!weight.reportValidity() || !limit.reportValidity()) return;
  const response = await runWorkerAction(worker, null, "Changing", `has weight ${weight.value} and ${Number(limit.value) ? `at most ${limit.value} in flight` : "no limit"}`, ...updateCall(worker, { weight: Number(weight.value), max_inflight: Number(limit.value) }));
  if (response?.ok) weight.touched = limit.touched = false;
}

/* ---- removing a worker, and undo ---- */
const UNDO_SECS = 20;
/* The settings with which a removed worker is added again; the proxy detects the rest. */
const RESTORED_FIELDS = ["model", "capabilities", "weight", "max_inflight", "loras", "kv_events", "kv_replay"];
let undoTimer = 0;
async function removeWorker(worker, button) {
  const requestsText = worker.in_flight ? ` Its ${pluralize(worker.in_flight, "request")} in flight will finish.` : "";
  const fileText = worker.origin === "api" ? "" : " It stays removed until its entry in the file changes or it is added again.";
  const processText = worker.origin === "launch" ? " Its process stops when its requests have ended." : "";
  const lastText = isLastServing(worker) ? " It is the only worker that takes requests." : "";
  if (!await confirmAction(`Remove ${nameOf(worker)}?`, `It gets no new requests and leaves the list.${requestsText}${processText}${fileText}${lastText}`, "Remove")) return;
  const record = await callApi("GET", pathOf(worker));
  const response = await runWorkerAction(worker, button, "Removing", "was removed", "DELETE", pathOf(worker));
  if (!response?.ok) return;
  $("fleet-title").focus();
  if (record.ok) offerUndo(record.body);
}
function offerUndo(record) {
  clearTimeout(undoTimer);
  const until = Date.now() + UNDO_SECS * 1000;
  const undo = createButton("", "primary", () => { clearTimeout(undoTimer); addAgain(record); });
  notify(`${formatTime(Date.now() / 1000)}: ${shortUrl(record.url)} was removed.`, "ok", undo);
  const tick = () => {
    const secs = Math.ceil((until - Date.now()) / 1000);
    if (secs <= 0) { if (undo.isConnected) notify("", ""); return; }
    setText(undo, `Undo (${secs} s)`);
    undoTimer = setTimeout(tick, 500);
  };
  tick();
}
function settingsOf(record) {
  const body = { url: record.url };
  for (const name of RESTORED_FIELDS) if (hasValue(record[name]) && record[name].length !== 0) body[name] = record[name];
  if (record.configured_ranks === "auto" || record.configured_ranks > 1) body.ranks = record.configured_ranks;
  if (record.role !== "regular") Object.assign(body, { role: record.role, kv_connector: record.kv_connector });
  if (record.role === "prefill" && record.bootstrap_port) body.bootstrap_port = record.bootstrap_port;
  return body;
}
async function addAgain(record) {
  const response = await runAction(`Adding ${shortUrl(record.url)} again`, `${shortUrl(record.url)} was added again with its previous settings`, "POST", "workers", JSON.stringify(settingsOf(record)), JSON_HEADERS);
  if (response.ok && record.disabled) await runAction(`Disabling ${shortUrl(record.url)}`, `${shortUrl(record.url)} was added again, disabled as before`, ...updateCall(response.body.worker, { disabled: true }));
}

/* ---- adding a worker ---- */
$("add-worker").addEventListener("click", () => $("add-worker").disabledReason ? notify($("add-worker").disabledReason, "warning") : openWorkerDialog());
function openWorkerDialog() {
  setText($("worker-message"), "");
  $("worker-models").replaceChildren(...[...new Set((snapshot.fleet ?? []).map((worker) => worker.model).filter(Boolean))].map((model) => new Option(model)));
  $("worker-dialog").showModal();
  $("worker-url").focus();
}
$("worker-cancel").addEventListener("click", () => $("worker-dialog").close());
$("worker-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const typed = $("worker-url").value.trim(), body = { url: typed.includes("://") ? typed : `http://${typed}` };
  for (const [id, name] of [["worker-model", "model"], ["worker-role", "role"]]) if ($(id).value.trim()) body[name] = $(id).value.trim();
  if ($("worker-weight").value) body.weight = Number($("worker-weight").value);
  if ($("worker-max-inflight").value) body.max_inflight = Number($("worker-max-inflight").value);
  setText($("worker-message"), "Adding and probing it …");
  setClass($("worker-message"), "small muted");
  const response = await callApi("POST", "workers", JSON.stringify(body), JSON_HEADERS);
  if (!response.ok) {
    setText($("worker-message"), response.error);
    setClass($("worker-message"), "small error");
    return;
  }
  const worker = response.body.worker;
  $("worker-dialog").close();
  $("worker-form").reset();
  notify(`${formatTime(Date.now() / 1000)}: ${shortUrl(worker.url)} was added${worker.routable ? "; it takes requests" : `; ${worker.why ?? "it takes no requests yet"}`}.`, worker.routable ? "ok" : "warning");
  notificationWorker = { id: worker.id, seen: false };
});

/* ---- ending a pause or a cordon ---- */
async function continueAll() {
  const paused = (snapshot.fleet ?? []).filter((worker) => worker.paused);
  const by = [...new Set(paused.map((worker) => worker.paused.by).filter(Boolean))].join(", ");
  if (!await confirmAction("Continue all workers?", `${pluralize(paused.length, "worker")} ${paused.length === 1 ? "is" : "are"} paused${by ? ` by ${by}` : ""}. A trainer that paused them may be in the middle of an update.`, "Continue")) return;
  await runAction("Continuing", "all workers generate again", "POST", "continue_generation", "{}", JSON_HEADERS);
}
async function resolveAll() {
  const urls = Object.keys(snapshot.weights?.uncertain ?? {}).map(shortUrl).join(", ");
  if (!await confirmAction("Have you verified the weights?", `${urls} may have weights of an update that failed. Resolving returns them to rotation as they are.`, "Resolve")) return;
  await runAction("Resolving", "the uncertain workers return to rotation", "POST", "weights/resolve", JSON.stringify({ acknowledge: true }), JSON_HEADERS);
}
async function abortSync() {
  const sync = snapshot.weights?.sync;
  if (!sync?.owner) return;
  const open = sync.state !== "grouped" ? " Workers that may hold a part of the round are out of rotation until you have verified their weights." : "";
  if (!await confirmAction(`Abort the sync of ${sync.owner.group_name}?`, `${syncText(sync)}. The next call of its trainer fails; the old version stays published.${open}`, "Abort")) return;
  await runAction("Aborting the sync", "the sync was aborted", "POST", "weights/sync/abort", "{}", JSON_HEADERS);
}
async function controlRollout(action) {
  if (action === "cancel" && !await confirmAction("Cancel the rollout?", "Workers that were updated get their previous weights back, if these still exist.", "Cancel the rollout")) return;
  await runAction(`Rollout: ${action}`, `requested ${action} of the rollout`, "POST", `weights/rollout/${action}`, "{}", JSON_HEADERS);
}
function rolloutButtons() {
  const rollout = activeRollout();
  if (!rollout) return [];
  const cancel = ["Cancel rollout", "weights", () => controlRollout("cancel")];
  return rollout.state === "paused" ? [["Resume", "weights", () => controlRollout("resume")], cancel] : rollout.state === "rolling_back" ? [] : [["Pause", "weights", () => controlRollout("pause")], cancel];
}

function confirmAction(title, text, label) {
  const dialog = $("confirm");
  setText($("confirm-title"), title);
  setText($("confirm-text"), text);
  setText($("confirm-ok"), label);
  dialog.showModal();
  $("confirm-cancel").focus();
  return new Promise((resolve) => {
    const close = (confirmed) => () => { dialog.onclose = null; dialog.close(); resolve(confirmed); };
    $("confirm-ok").onclick = close(true);
    $("confirm-cancel").onclick = close(false);
    dialog.onclose = () => resolve(false);
  });
}
