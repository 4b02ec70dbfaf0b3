/* The feed: the state of the proxy each second, and the notice while the feed is disconnected. */
const WINDOW_SECS = 900, SILENT_SECS = 6;
let last = null, points = [], turn = 0, hurry = null, aborting = null, heardAt = 0, tries = 0;

function stop() { turn += 1; aborting?.abort(); hurry?.(); }
function start() { stop(); tries = 0; follow(turn); }
$("again").addEventListener("click", start);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !$("lost").hidden) start(); });
/* A browser keeps pages that were left, to go back to. Each would hold one of the six connections that it opens to a host. */
addEventListener("pagehide", stop);
addEventListener("pageshow", (event) => { if (event.persisted) start(); });

async function follow(mine) {
  while (mine === turn) {
    const why = await listen(mine);
    if (mine !== turn) return;
    const wait = Math.min(10, 0.5 * 2 ** tries) * (0.75 + Math.random() / 2);
    tries += 1;
    await pause(mine, wait, why);
  }
}
/* Reads until the stream ends; returns the reason. */
async function listen(mine) {
  const stopper = aborting = new AbortController();
  heardAt = Date.now();
  const watch = setInterval(() => { if (Date.now() - heardAt > SILENT_SECS * 1000) stopper.abort(); }, 500);
  try {
    const answer = await fetch("feed", { headers: withKey({ Accept: "text/event-stream" }), signal: stopper.signal, cache: "no-store", credentials: "omit" });
    if (answer.status === 401 || answer.status === 403) {
      const told = await answer.json().catch(() => ({}));
      if (mine === turn) lock(answer.status, told);
      return "";
    }
    if (!answer.ok) {
      const told = await answer.json().catch(() => ({}));
      return `it answers ${answer.status}${told.error?.message ? `, ${told.error.message}` : ""}`;
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "it closed the connection";
      heardAt = Date.now();
      const events = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length && mine === turn) take(JSON.parse(data.join("\n")));
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
async function pause(mine, secs, why) {
  const until = Date.now() + secs * 1000;
  let hurried = false;
  while (mine === turn && !hurried && Date.now() < until) {
    const age = last ? `What you see is from ${clock(last.at)}, ${ago(Date.now() / 1000 - heard)} ago. ` : "";
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
      hurry = () => { hurried = true; clearTimeout(timer); resume(); };
    });
  }
}
let heard = 0;
function take(told) {
  tries = 0;
  heard = Date.now() / 1000;
  if (told.history) {
    const newest = points.length ? points.at(-1).at : -Infinity;
    /* The first event has the whole history; later ones have only new points. */
    points = told.history.length > 5 || !points.length ? told.history : points.concat(told.history.filter((point) => point.at > newest));
    points = points.slice(-WINDOW_SECS);
  }
  last = told;
  show($("lost"), false);
  show($("live"), true);
  show($("forget"), Boolean(key));
  dress(document.body, "");
  paint();
}

