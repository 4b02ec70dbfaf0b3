/* The last part: all others are defined, so the page starts. */
setInterval(() => {
  if (last && $("lost").hidden && !document.hidden && Date.now() / 1000 - heard > 3) say($("link"), `nothing heard for ${ago(Date.now() / 1000 - heard)}`);
}, 1000);
start();
