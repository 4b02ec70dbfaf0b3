/* The state of a worker, its reason and its cause, and which workers are slow or silent. */
const isPaused = (worker) => Boolean(worker.paused) && !worker.drain && !worker.disabled;
/* Requests to a paused engine hang, whether or not the pause takes it out of rotation. */
const takesRequests = (worker) => worker.routable && !worker.paused;
function pauseText({ at, by, path, mode }) {
  const details = [path, mode].filter(Boolean).join(", ");
  return `${at ? `for ${formatDuration(toSeconds(snapshot.at) - toSeconds(at))} ` : ""}${by ? `by ${by} ` : ""}${details ? `(${details})` : ""}`.trim();
}
/* The caller that took the worker out of rotation, and for how long; "" if there is none or it is unknown. */
function callerText(worker) {
  if (isPaused(worker)) return pauseText(worker.paused);
  const cause = worker.disabled ? worker.disabled_by : null;
  if (!cause) return "";
  return `${cause.at ? `for ${formatDuration(toSeconds(snapshot.at) - toSeconds(cause.at))}` : ""}${cause.by ? ` by ${cause.by}` : ""}`.trim();
}
/* The name of the state, its kind, and whether the worker is out of rotation. */
function workerState(worker) {
  const cordons = worker.held_by ?? [];
  if (worker.health === "dead") return ["dead", "error", true];
  if (worker.health === "unhealthy") return ["unhealthy", "error", true];
  if (isPaused(worker)) return ["PAUSED", "error", true];
  if (cordons.includes("uncertain")) return ["weights uncertain", "error", true];
  if (worker.drain) return [{ drained: "drained", overdue: "drain overdue" }[worker.drain.state] ?? "draining", "warning", true];
  if (worker.disabled) return ["disabled", "warning", true];
  if (cordons.length) return [cordons.includes("launch") ? "starting" : cordons.join(", "), "info", true];
  if (worker.health === "unknown") return ["not checked yet", "warning", true];
  if (worker.half_open) return ["half-open", "warning", !worker.routable];
  return takesRequests(worker) ? ["takes requests", "ok", false] : ["out", "warning", true];
}
/* Is removed from the error texts of the system: the errno and the repeated address. */
const ERROR_PREFIX = /\[Errno -?\d+\] (?:Error connecting to \([^()]*\): )?/g;
/* The reason without the state, which is shown before it. */
const reasonWithoutState = (reason, name) => reason === name || reason === "held: " + name ? "" : reason.startsWith(name + ": ") ? reason.slice(name.length + 2) : reason;
function groupByModel(fleet) {
  const groups = new Map();
  for (const worker of fleet) groups.set(worker.model ?? "", [...(groups.get(worker.model ?? "") ?? []), worker]);
  return [...groups.values()];
}
/* The workers that the proxy reports as slow, by id: { times, text }. */
const slowWorkers = (fleet) => new Map(fleet.filter((worker) => worker.slow).map((worker) => [worker.id, { ...worker.slow, worker }]));

const isSilent = (worker) => worker.routable && hasValue(worker.silent_secs);

