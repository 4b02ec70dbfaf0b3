"""The page that renders /openapi.json, for /docs and /redoc.

Invariant: it loads nothing but that document, from this server, so it works offline; everything it
shows is inserted as text, never as HTML.
"""

from __future__ import annotations

from typing import Final

POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sglang-omni - API</title>
<style>
:root { color-scheme: light dark; --line: #8884; --faint: #888; --accent: #2a6fdb; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin: 2rem 0 .5rem; text-transform: capitalize; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; display: flex; gap: .8rem; align-items: baseline; flex-wrap: wrap; }
summary b { color: var(--accent); font: 600 13px ui-monospace, monospace; min-width: 3.5rem; }
summary code { font-weight: 600; }
code, td { font: 13px/1.5 ui-monospace, monospace; }
.faint { color: var(--faint); }
table { border-collapse: collapse; margin: .5rem 0 .5rem 1rem; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
p { margin: .4rem 0 .4rem 1rem; }
</style>
</head>
<body>
<h1 id="title">API</h1>
<p class="faint" id="about">Reading openapi.json</p>
<main id="routes"></main>
<noscript>This page needs JavaScript; the same is in <a href="/openapi.json">openapi.json</a>.
</noscript>
<script>
"use strict";
let schemas = {};

function node(kind, text, ...children) {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function resolved(schema) {
  if (!schema || !schema.$ref) return schema || {};
  return schemas[schema.$ref.split("/").pop()] || {};
}

function words(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map(each => JSON.stringify(each)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(words).filter(each => each !== "null").join(" | ");
  if (schema.type === "array") return "list of " + words(schema.items || {});
  if (schema.contentMediaType) return "file";
  const bounds = [];
  if ("minimum" in schema) bounds.push("\\u2265 " + schema.minimum);
  if ("exclusiveMinimum" in schema) bounds.push("> " + schema.exclusiveMinimum);
  if ("maximum" in schema) bounds.push("\\u2264 " + schema.maximum);
  const kind = Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "any";
  return bounds.length ? kind + " (" + bounds.join(", ") + ")" : kind;
}

function fields(schema, depth) {
  const whole = resolved(schema);
  if (whole.anyOf) {
    return node("div", "", ...whole.anyOf.map(each => node("div", "", node("p", "either:"),
      fields(each, depth))));
  }
  const table = node("table");
  for (const [name, each] of Object.entries(whole.properties || {})) {
    const needed = (whole.required || []).includes(name);
    const row = node("tr", "", node("td", name), node("td", words(each)));
    const rest = needed ? "required" : each.default === undefined || each.default === null ? ""
      : "default " + JSON.stringify(each.default);
    const last = node("td", rest);
    last.className = "faint";
    row.append(last);
    table.append(row);
    const inner = each.items && each.items.$ref ? each.items
      : (each.anyOf || [each]).find(one => one.$ref);
    if (inner && depth < 3) {
      const cell = node("td", "", fields(inner, depth + 1));
      cell.colSpan = 3;
      table.append(node("tr", "", cell));
    }
  }
  return table;
}

function route(path, method, told) {
  const head = node("summary", "", node("b", method.toUpperCase()), node("code", path),
    node("span", told.summary));
  const made = node("details", "", head);
  if (told.security) made.append(node("p", "Needs the admin key, where the server has one."));
  if (told.parameters) {
    const table = node("table");
    for (const each of told.parameters) {
      table.append(node("tr", "", node("td", each.name), node("td", each.in),
        node("td", each.required ? "required" : "")));
    }
    made.append(table);
  }
  for (const [media, body] of Object.entries((told.requestBody || {}).content || {})) {
    made.append(node("p", "Takes " + media), fields(body.schema, 0));
  }
  const answers = Object.keys(told.responses["200"].content || {});
  made.append(node("p", "Answers " + answers.join(", ")));
  return made;
}

async function show() {
  const answer = await fetch("/openapi.json");
  const whole = await answer.json();
  schemas = whole.components.schemas;
  document.getElementById("title").textContent = whole.info.title + " " + whole.info.version;
  document.getElementById("about").textContent = whole.info.description;
  const groups = {};
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, told] of Object.entries(methods)) {
      (groups[told.tags[0]] ||= []).push(route(path, method, told));
    }
  }
  const order = ["text", "audio", "information"];
  const names = Object.keys(groups).sort((a, b) =>
    (order.includes(a) ? order.indexOf(a) : 9) - (order.includes(b) ? order.indexOf(b) : 9));
  for (const name of names) {
    document.getElementById("routes").append(node("h2", name), ...groups[name]);
  }
}

show().catch(error => {
  document.getElementById("about").textContent = "openapi.json cannot be read: " + error;
});
</script>
</body>
</html>
"""
