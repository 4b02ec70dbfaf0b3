/* Changes by the operator: each call reports its result, and asks for confirmation if it can't be undone. */
const TOLD_SECS = { ok: 8, warn: 8, bad: 30 };
let telling = 0, toldOf = null;  // the worker of the report: { id, seen }
/* A report disappears after some seconds, a failure later; one of a running action or with a button stays until it is replaced. */
function report(text, kind, ...buttons) {
  clearTimeout(telling);
  toldOf = null;
  say($("notice-text"), text);
  dress($("notice-text"), kind);
  $("notice-actions").replaceChildren(...buttons, pressed("Close", "", () => report("", "")));
  show($("notice"), Boolean(text));
  if (text && TOLD_SECS[kind] && !buttons.length) telling = setTimeout(() => report("", ""), TOLD_SECS[kind] * 1000);
}
/* A report about a worker disappears with the worker. */
function dropReport(fleet) {
  if (!toldOf) return;
  const there = fleet.some((worker) => worker.id === toldOf.id);
  if (toldOf.seen && !there) report("", "");
  else toldOf.seen = there;  // the feed may be older than a worker that was just added
}
cleaners.push(() => { report("", ""); clearTimeout(undoing); undoing = 0; });
const named = (worker) => short(worker.url);
const pathOf = (worker) => "workers/" + worker.id;
const JSON_BODY = { "Content-Type": "application/json" };
const put = (worker, fields) => ["PUT", pathOf(worker), JSON.stringify(fields), JSON_BODY];
const alone = (worker) => takes(worker) && (last.fleet ?? []).filter(takes).length === 1;

/* `words`: the action while it runs; `done`: its result. */
async function change(words, done, ...call) {
  report(`${words} …`, "quiet");
  const answer = await ask(...call);
  const at = clock(Date.now() / 1000);
  if (answer.ok) report(`${at}: ${done}.`, "ok");
  else report(`${at}: ${words} failed: ${answer.why}`, "bad");
  return answer;
}
async function act(worker, button, words, done, ...call) {
  if (button?.getAttribute("aria-busy") === "true") return null;
  button?.setAttribute("aria-busy", "true");
  const answer = await change(`${words} ${named(worker)}`, `${named(worker)} ${done}`, ...call);
  button?.removeAttribute("aria-busy");
  if (!answer.ok) toldOf = { id: worker.id, seen: false };
  return answer;
}
const ONLY = "It is the only worker that takes requests: all requests will fail or wait until another one does.";
async function flip(worker, button) {
  const off = !(worker.disabled || worker.drain);
  if (off && alone(worker) && !await sure(`Disable ${named(worker)}?`, ONLY, "Disable it")) return;
  await setDisabled(worker, off, button);
}
async function setDisabled(worker, off, button) {
  await act(worker, button, off ? "Disabling" : "Enabling", off ? "is disabled; it finishes what it has" : "is enabled", ...put(worker, { disabled: off }));
}
async function drain(worker, button) {
  if (alone(worker) && !await sure(`Drain ${named(worker)}?`, ONLY, "Drain it")) return;
  await act(worker, button, "Draining", "drains: it gets no new request", "POST", pathOf(worker) + "/drain", "{}", JSON_BODY);
}
async function revive(worker, button) {
  await act(worker, button, "Reviving", "starts anew: its failures are forgotten, and it was probed", ...put(worker, { is_dead: false }));
}
async function setBalance(worker, weight, bound) {
  if (!weight.reportValidity() || !bound.reportValidity()) return;
  const answer = await act(worker, null, "Changing", `has weight ${weight.value} and ${Number(bound.value) ? `at most ${bound.value} in flight` : "no bound"}`, ...put(worker, { weight: Number(weight.value), max_inflight: Number(bound.value) }));
  if (answer?.ok) weight.touched = bound.touched = false;
}

/* ---- removing, and undoing it ---- */
const UNDO_SECS = 20;
/* The settings with which a removed worker is added again; the proxy detects the rest. */
const KEPT = ["model", "capabilities", "weight", "max_inflight", "loras", "kv_events", "kv_replay"];
let undoing = 0;
async function remove(worker, button) {
  const running = worker.in_flight ? ` Its ${one(worker.in_flight, "request")} in flight will finish.` : "";
  const stays = worker.origin === "api" ? "" : " It stays away until its entry in the file changes or it is added again.";
  const ends = worker.origin === "launch" ? " Its process stops when its requests have ended." : "";
  const only = alone(worker) ? " It is the only worker that takes requests." : "";
  if (!await sure(`Remove ${named(worker)}?`, `It gets no new request and leaves the list.${running}${ends}${stays}${only}`, "Remove it")) return;
  const before = await ask("GET", pathOf(worker));
  const answer = await act(worker, button, "Removing", "was removed", "DELETE", pathOf(worker));
  if (!answer?.ok) return;
  $("fleet-title").focus();
  if (before.ok) offerUndo(before.body);
}
function offerUndo(record) {
  clearTimeout(undoing);
  const until = Date.now() + UNDO_SECS * 1000;
  const undo = pressed("", "main", () => { clearTimeout(undoing); addAgain(record); });
  report(`${clock(Date.now() / 1000)}: ${short(record.url)} was removed.`, "ok", undo);
  const tick = () => {
    const secs = Math.ceil((until - Date.now()) / 1000);
    if (secs <= 0) { if (undo.isConnected) report("", ""); return; }
    say(undo, `Undo (${secs} s)`);
    undoing = setTimeout(tick, 500);
  };
  tick();
}
function settingsOf(record) {
  const body = { url: record.url };
  for (const name of KEPT) if (known(record[name]) && record[name].length !== 0) body[name] = record[name];
  if (record.configured_ranks === "auto" || record.configured_ranks > 1) body.ranks = record.configured_ranks;
  if (record.role !== "regular") Object.assign(body, { role: record.role, kv_connector: record.kv_connector });
  if (record.role === "prefill" && record.bootstrap_port) body.bootstrap_port = record.bootstrap_port;
  return body;
}
async function addAgain(record) {
  const answer = await change(`Adding ${short(record.url)} again`, `${short(record.url)} is back, with the settings that it had`, "POST", "workers", JSON.stringify(settingsOf(record)), JSON_BODY);
  if (answer.ok && record.disabled) await change(`Disabling ${short(record.url)}`, `${short(record.url)} is back, disabled as it was`, ...put(answer.body.worker, { disabled: true }));
}

/* ---- adding ---- */
$("add").addEventListener("click", () => $("add").why ? report($("add").why, "warn") : openAdding());
function openAdding() {
  say($("adding-result"), "");
  $("adding-models").replaceChildren(...[...new Set((last.fleet ?? []).map((worker) => worker.model).filter(Boolean))].map((model) => new Option(model)));
  $("adding").showModal();
  $("add-url").focus();
}
$("adding-no").addEventListener("click", () => $("adding").close());
$("adding-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const typed = $("add-url").value.trim(), body = { url: typed.includes("://") ? typed : `http://${typed}` };
  for (const [id, name] of [["add-model", "model"], ["add-role", "role"]]) if ($(id).value.trim()) body[name] = $(id).value.trim();
  if ($("add-weight").value) body.weight = Number($("add-weight").value);
  if ($("add-bound").value) body.max_inflight = Number($("add-bound").value);
  say($("adding-result"), "adding and probing it …");
  dress($("adding-result"), "small quiet");
  const answer = await ask("POST", "workers", JSON.stringify(body), JSON_BODY);
  if (!answer.ok) {
    say($("adding-result"), answer.why);
    dress($("adding-result"), "small bad");
    return;
  }
  const worker = answer.body.worker;
  $("adding").close();
  $("adding-form").reset();
  report(`${clock(Date.now() / 1000)}: ${short(worker.url)} was added${worker.routable ? "; it takes requests" : `; ${worker.why ?? "it takes no requests yet"}`}.`, worker.routable ? "ok" : "warn");
  toldOf = { id: worker.id, seen: false };
});

/* ---- ending a pause or a cordon ---- */
async function continueAll() {
  const paused = (last.fleet ?? []).filter((worker) => worker.paused);
  const by = [...new Set(paused.map((worker) => worker.paused.by).filter(Boolean))].join(", ");
  if (!await sure("Let all workers continue?", `${one(paused.length, "worker")} ${paused.length === 1 ? "is" : "are"} paused${by ? ` by ${by}` : ""}. A trainer that paused them may be in the middle of an update.`, "Continue")) return;
  await change("Continuing", "the workers continue", "POST", "continue_generation", "{}", JSON_BODY);
}
async function resolveAll() {
  const urls = Object.keys(last.weights?.uncertain ?? {}).map(short).join(", ");
  if (!await sure("Have you verified the weights?", `${urls} may have weights of an update that failed. Resolving returns them to rotation as they are.`, "I have, resolve")) return;
  await change("Resolving", "the uncertain workers return to rotation", "POST", "weights/resolve", JSON.stringify({ acknowledge: true }), JSON_BODY);
}
async function abortSync() {
  const sync = last.weights?.sync;
  if (!sync?.owner) return;
  const open = sync.state !== "grouped" ? " Workers that may hold a part of the round are out of rotation until you have verified their weights." : "";
  if (!await sure(`Abort the sync of ${sync.owner.group_name}?`, `${syncWords(sync)}. Its trainer is told so at its next call; the old version stays published.${open}`, "Abort it")) return;
  await change("Aborting the sync", "the group has ended", "POST", "weights/sync/abort", "{}", JSON_BODY);
}
async function steerRollout(word) {
  if (word === "cancel" && !await sure("Cancel the rollout?", "Workers that were updated get their old weights back, where there are any.", "Cancel the rollout")) return;
  await change(`Rollout: ${word}`, `the rollout was asked to ${word}`, "POST", `weights/rollout/${word}`, "{}", JSON_BODY);
}
function rolloutButtons() {
  const rollout = rollingOut();
  if (!rollout) return [];
  const cancel = ["Cancel rollout", "weights", () => steerRollout("cancel")];
  return rollout.state === "paused" ? [["Resume", "weights", () => steerRollout("resume")], cancel] : rollout.state === "rolling_back" ? [] : [["Pause", "weights", () => steerRollout("pause")], cancel];
}

function sure(title, text, word) {
  const dialog = $("confirm");
  say($("confirm-title"), title);
  say($("confirm-text"), text);
  say($("confirm-yes"), word);
  dialog.showModal();
  $("confirm-no").focus();
  return new Promise((resolve) => {
    const end = (answer) => () => { dialog.onclose = null; dialog.close(); resolve(answer); };
    $("confirm-yes").onclick = end(true);
    $("confirm-no").onclick = end(false);
    dialog.onclose = () => resolve(false);
  });
}
