"""/docs without the internet: one small page that draws /openapi.json by itself."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Foveal API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .35rem 0; }
code, .method { font-family: ui-monospace, monospace; }
.method { display: inline-block; width: 4.5rem; font-weight: 600; text-transform: uppercase; }
table { border-collapse: collapse; width: 100%; margin: .3rem 0 1rem; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0;
  border-bottom: 1px solid #8884; }
.type { opacity: .75; } h2 { margin-top: 2rem; }
</style></head><body>
<h1>Foveal API</h1><p id="about"></p><div id="paths"></div><h2>Types</h2><div id="types"></div>
<p><a href="openapi.json">openapi.json</a></p>
<script>
const el = (tag, text, cls) => { const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };
const name = ref => ref.split("/").pop();
function type(s) {
  if (!s) return "any";
  if (s.$ref) return name(s.$ref);
  if (s.anyOf || s.oneOf) return (s.anyOf || s.oneOf).map(type).join(" | ");
  if (s.const !== undefined) return JSON.stringify(s.const);
  if (s.enum) return s.enum.map(v => JSON.stringify(v)).join(" | ");
  if (s.type === "array") return "list of " + type(s.items);
  const limits = [["minimum", ">="], ["exclusiveMinimum", ">"], ["maximum", "<="],
    ["exclusiveMaximum", "<"]].filter(([k]) => s[k] !== undefined).map(([k, t]) => t + " " + s[k]);
  return (s.type || "any") + (limits.length ? " (" + limits.join(", ") + ")" : "");
}
function fields(schema) {
  const table = el("table");
  for (const [key, s] of Object.entries(schema.properties || {})) {
    const row = el("tr"); const first = el("td"); first.append(el("code", key));
    if ((schema.required || []).includes(key)) first.append(" *");
    row.append(first, el("td", type(s), "type"), el("td", s.description || ""));
    table.append(row);
  }
  return table;
}
fetch("openapi.json").then(r => r.json()).then(doc => {
  document.getElementById("about").textContent =
    doc.info.description + " Version " + doc.info.version + ".";
  const paths = document.getElementById("paths");
  for (const [path, methods] of Object.entries(doc.paths))
    for (const [method, op] of Object.entries(methods)) {
      const box = el("details"); const head = el("summary");
      head.append(el("span", method, "method"), el("code", path)); box.append(head);
      box.append(el("p", op.description || op.summary || ""));
      const body = op.requestBody && op.requestBody.content["application/json"];
      if (body) box.append(el("p", "Body: " + type(body.schema)));
      const table = el("table");
      for (const [status, r] of Object.entries(op.responses)) {
        const row = el("tr");
        const kinds = Object.entries(r.content || {}).map(([k, c]) => k + ": " + type(c.schema));
        row.append(el("td", status), el("td", kinds.join("; "), "type"), el("td", r.description));
        table.append(row);
      }
      box.append(table); paths.append(box);
    }
  const types = document.getElementById("types");
  for (const [key, schema] of Object.entries((doc.components || {}).schemas || {})) {
    const box = el("details"); const head = el("summary"); head.append(el("code", key));
    box.append(head, el("p", schema.description || ""), fields(schema)); types.append(box);
  }
});
</script></body></html>
"""
