/* The last part: all others are defined, so the page starts. */
setInterval(() => {
  if (last && $("lost").hidden && !document.hidden && Date.now() / 1000 - snapshotAt > 3) say($("link"), `no data for ${ago(Date.now() / 1000 - snapshotAt)}`);
}, 1000);
start();
