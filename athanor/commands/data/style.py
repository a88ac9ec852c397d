"""The look of the report: light and dark, screen and paper, any width."""

from __future__ import annotations

STYLE = """
:root { --bg: #fff; --fg: #1c2127; --dim: #55606b; --line: #d5dae0; --soft: #f3f5f7; --link: #0b5cad;
  --kept: #2c7fb8;
  --dropped: #c4480c; --warn: #fff3d6; --warnline: #d9a400; --limit: #1c2127; --del: #b8420a; --ins: #1f6596;
  --c0: #c4480c; --c1: #8e5aa8; --c2: #b88200; --c3: #0f8a6d; --c4: #b5326e; --c5: #6b7d1e; --c6: #7a5c3e;
    --c7: #7b848d; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --fg: #e4e7eb; --dim: #a4adb7; --line: #363d45;
  --soft: #1e2328;
  --link: #7cb8f2; --kept: #4b9fd5; --dropped: #f07a3f; --warn: #3a3013; --warnline: #b98d12; --limit: #fff;
  --del: #f07a3f; --ins: #4b9fd5;
  --c0: #f07a3f; --c1: #b98ad0; --c2: #e0b040; --c3: #3fbf9e; --c4: #e0709f; --c5: #a3b84e; --c6: #b8926c;
    --c7: #8f99a3; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2.5rem) 4rem; max-width: 80rem; background: var(--bg);
  color: var(--fg);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; margin: .5rem 0 0; line-height: 1.2; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
h4 { font-size: .95rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; max-width: 75ch; }
a { color: var(--link); }
.note, .small { color: var(--dim); font-size: .9rem; }
.warn { background: var(--warn); border-left: 4px solid var(--warnline); padding: .4rem .7rem; }
.badge { background: var(--warn); border: 1px solid var(--warnline); border-radius: 4px; padding: 0 .35rem;
  font-size: .8rem;
  font-weight: 600; white-space: nowrap; }
nav ol { columns: 15rem 4; padding-left: 1.4rem; margin: 1rem 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.2rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div { background: var(--soft); border-radius: 6px; padding: .5rem .7rem; display: flex;
  flex-direction: column-reverse;
  justify-content: flex-end; }
.tiles dt { color: var(--dim); font-size: .85rem; line-height: 1.25; }
.tiles dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; max-width: 100%; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; min-width: min(100%, 24rem); }
caption { text-align: left; color: var(--dim); font-size: .85rem; padding-bottom: .2rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th, th.n { font-weight: 600; white-space: normal; vertical-align: bottom; }
code, pre { font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.bar { display: flex; height: 1.3rem; width: 100%; background: var(--soft); border-radius: 3px; overflow: hidden;
  margin: .15rem 0; }
.bar i { display: block; min-width: 1px; }
.bar.thin { height: .9rem; }
.target { position: relative; }
.target b { position: absolute; top: -.1rem; bottom: -.1rem; width: 2px; background: var(--limit); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .15rem 1rem; padding: 0; margin: .3rem 0;
  font-size: .88rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -.05rem; }
.kept { background: var(--kept); fill: var(--kept); } .dropped { background: var(--dropped); fill: var(--dropped); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem;
  align-items: start; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .88rem; font-weight: 600; overflow-wrap: anywhere; }
figure p { margin: 0; font-size: .8rem; color: var(--dim); }
figure svg { display: block; width: 100%; height: 6rem; background: var(--soft); border-radius: 3px; }
figure svg .axis { stroke: var(--dim); } figure svg .limit { stroke: var(--limit); stroke-dasharray: 4 3; }
.ends { display: flex; justify-content: space-between; font-size: .78rem; color: var(--dim); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: 0 .7rem; }
details > :last-child { margin-bottom: .7rem; }
summary { cursor: pointer; padding: .4rem 0; font-weight: 600; }
article { margin: .6rem 0; }
article > p { font-size: .85rem; color: var(--dim); max-width: none; overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: 4px; padding: .5rem .7rem; margin: .2rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; tab-size: 4; max-height: 24rem; overflow-y: auto; }
.del { color: var(--del); } .ins { color: var(--ins); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media (max-width: 40rem) { body { font-size: 15px; } th, td { padding-right: .35rem; font-size: .76rem; }
  .beside { display: none; }
  .tiles dd { font-size: 1.1rem; } }
@media print { body { max-width: none; font-size: 10pt; } pre { max-height: none; } figure, article, tr {
  break-inside: avoid; }
  details::details-content { content-visibility: visible; display: block; } .scroll { overflow: visible; } nav {
    display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
""".strip()
