"""The look of report.html."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2530; --soft: #5b6673; --faint: #dfe3e8;
  --accent: #3b7dd8; --good: #2f8f5f; --bad: #c43d50;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --card: #1c2229; --ink: #e6eaef; --soft: #9aa6b2; --faint: #36404b;
    --accent: #6ea5ee; --good: #58b98a; --bad: #ec7484; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 14px; letter-spacing: -0.005em; }
h3 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0 0 10px; } .soft { color: var(--soft); } .small { font-size: 13px; line-height: 1.45; }
.tiles { display: grid; gap: 14px; margin-top: 26px;
  grid-template-columns: repeat(auto-fit, minmax(196px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--faint); border-radius: 10px;
  padding: 16px 18px; min-width: 0; }
.tile b { display: block; font-size: 21px; line-height: 1.25; font-weight: 650;
  letter-spacing: -0.015em; white-space: nowrap; }
.tile .label { color: var(--soft); font-size: 13px; }
.up { color: var(--good); } .down { color: var(--bad); }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.grid.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
@media (max-width: 820px) { .grid, .grid.three { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; } figcaption { color: var(--soft); font-size: 13px; line-height: 1.45;
  margin-bottom: 8px; }
figure svg { display: block; width: 100%; height: auto; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; }
td, th { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
td.n, th.n { text-align: right; } tr:last-child td { border-bottom: 0; }
tr.sum td { font-weight: 600; }
pre { overflow-x: auto; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details summary { cursor: pointer; color: var(--accent); }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""
