/* The feed: the state of the proxy each second, and the notice while the feed is disconnected. */
const WINDOW_SECS = 900, SILENT_SECS = 6;
let last = null, points = [], turn = 0, retryNow = null, aborting = null, receivedAt = 0, tries = 0;

function stop() { turn += 1; aborting?.abort(); retryNow?.(); }
function start() { stop(); tries = 0; follow(turn); }
$("again").addEventListener("click", start);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !$("lost").hidden) start(); });
/* A browser keeps pages that were left, to go back to. Each would hold one of the six connections that it opens to a host. */
addEventListener("pagehide", stop);
addEventListener("pageshow", (event) => { if (event.persisted) start(); });

async function follow(ownTurn) {
  while (ownTurn === turn) {
    const why = await listen(ownTurn);
    if (ownTurn !== turn) return;
    const wait = Math.min(10, 0.5 * 2 ** tries) * (0.75 + Math.random() / 2);
    tries += 1;
    await pause(ownTurn, wait, why);
  }
}
/* Reads until the stream ends; returns the reason. */
async function listen(ownTurn) {
  const stopper = aborting = new AbortController();
  receivedAt = Date.now();
  const watch = setInterval(() => { if (Date.now() - receivedAt > SILENT_SECS * 1000) stopper.abort(); }, 500);
  try {
    const answer = await fetch("feed", { headers: withKey({ Accept: "text/event-stream" }), signal: stopper.signal, cache: "no-store", credentials: "omit" });
    if (answer.status === 401 || answer.status === 403) {
      const body = await answer.json().catch(() => ({}));
      if (ownTurn === turn) lock(answer.status, body);
      return "";
    }
    if (!answer.ok) {
      const body = await answer.json().catch(() => ({}));
      return `it answers ${answer.status}${body.error?.message ? `, ${body.error.message}` : ""}`;
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "it closed the connection";
      receivedAt = Date.now();
      const events = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length && ownTurn === turn) take(JSON.parse(data.join("\n")));
      }
    }
  } catch (error) {
    if (error instanceof SyntaxError) return "it sent what can't be read";
    return stopper.signal.aborted ? "it fell silent" : "it can't be reached";
  } finally {
    clearInterval(watch);
    stopper.abort();
  }
}
const BEFORE = "Last known: ";
async function pause(ownTurn, secs, why) {
  const until = Date.now() + secs * 1000;
  let immediate = false;
  while (ownTurn === turn && !immediate && Date.now() < until) {
    const age = last ? `What you see is from ${clock(last.at)}, ${ago(Date.now() / 1000 - snapshotAt)} ago. ` : "";
    say($("lost-words"), `Connection lost: ${why}.`);
    say($("lost-age"), `${age}Trying again in ${Math.ceil((until - Date.now()) / 1000)} s.`);
    if (last && !$("state").textContent.startsWith(BEFORE)) say($("state"), BEFORE + $("state").textContent);
    dress($("state"), "quiet");
    show($("lost"), true);
    dress(document.body, "stale");
    say($("link"), "connection lost");
    document.title = "connection lost · omni-proxy";
    await new Promise((resume) => {
      const timer = setTimeout(resume, 250);
      retryNow = () => { immediate = true; clearTimeout(timer); resume(); };
    });
  }
}
let snapshotAt = 0;
function take(snapshot) {
  tries = 0;
  snapshotAt = Date.now() / 1000;
  if (snapshot.history) {
    const newest = points.length ? points.at(-1).at : -Infinity;
    /* The first event has the whole history; later ones have only new points. */
    points = snapshot.history.length > 5 || !points.length ? snapshot.history : points.concat(snapshot.history.filter((point) => point.at > newest));
    points = points.slice(-WINDOW_SECS);
  }
  last = snapshot;
  show($("lost"), false);
  show($("live"), true);
  show($("forget"), Boolean(key));
  dress(document.body, "");
  paint();
}

