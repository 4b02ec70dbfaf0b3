/* The name of a worker's state, the caller that caused it, and which workers are slow. */
const isPaused = (worker) => Boolean(worker.paused) && !worker.drain && !worker.disabled;
/* Requests to a paused engine hang, whether or not the pause takes it out of rotation. */
const takes = (worker) => worker.routable && !worker.paused;
function pauseWords({ at, by, path, mode }) {
  const how = [path, mode].filter(Boolean).join(", ");
  return `${at ? `for ${ago(seconds(last.at) - seconds(at))} ` : ""}${by ? `by ${by} ` : ""}${how ? `(${how})` : ""}`.trim();
}
/* The caller that took the worker out of rotation, and for how long; "" if there is none or it is unknown. */
function byWhom(worker) {
  if (isPaused(worker)) return pauseWords(worker.paused);
  const who = worker.disabled ? worker.disabled_by : null;
  if (!who) return "";
  return `${who.at ? `for ${ago(seconds(last.at) - seconds(who.at))}` : ""}${who.by ? ` by ${who.by}` : ""}`.trim();
}
function standing(worker) {
  const held = worker.held_by ?? [];
  if (worker.health === "dead") return ["dead", "bad", true];
  if (worker.health === "unhealthy") return ["unhealthy", "bad", true];
  if (isPaused(worker)) return ["PAUSED", "bad", true];
  if (held.includes("uncertain")) return ["weights uncertain", "bad", true];
  if (worker.drain) return [{ drained: "drained", overdue: "drain overdue" }[worker.drain.state] ?? "draining", "warn", true];
  if (worker.disabled) return ["disabled", "warn", true];
  if (held.length) return [held.includes("launch") ? "starting" : held.join(", "), "blue", true];
  if (worker.health === "unknown") return ["not checked yet", "warn", true];
  if (worker.half_open) return ["half-open", "warn", !worker.routable];
  return takes(worker) ? ["takes requests", "ok", false] : ["out", "warn", true];
}
/* The reason without the state, which is shown before it. */
/* A system's error text without errno, and without the repeated address. */
const NOISE = /\[Errno -?\d+\] (?:Error connecting to \([^()]*\): )?/g;
const reason = (why, name) => why === name || why === "held: " + name ? "" : why.startsWith(name + ": ") ? why.slice(name.length + 2) : why;
function byModel(fleet) {
  const groups = new Map();
  for (const worker of fleet) groups.set(worker.model ?? "", [...(groups.get(worker.model ?? "") ?? []), worker]);
  return [...groups.values()];
}
/* The workers that the proxy reports as slow, by id: { times, text }. */
const slowOnes = (fleet) => new Map(fleet.filter((worker) => worker.slow).map((worker) => [worker.id, { ...worker.slow, worker }]));

const isSilent = (worker) => worker.routable && known(worker.silent_secs);

