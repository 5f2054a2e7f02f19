"""The page's style sheet, light and dark. Used by page.py, which puts its hash into the policy.

The eight colours of lines keep apart for most kinds of colour blindness and on both backgrounds.
"""

from __future__ import annotations

from foveal_operator.cli.dashboard.heat import NUM_STEPS

_LIGHT = ("#2563c9", "#d9730d", "#1a9a74", "#b8408f", "#7a5cc8", "#9a8500", "#2b9fc4", "#8a5a3c")
_DARK = ("#6ea8ff", "#ffa552", "#46cfa4", "#f07fc4", "#b39dff", "#d9c53f", "#67d0f0", "#c99a78")

_SHEET = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1b2330;--soft:#5c6778;
--rule:#e3e7ed;--base:#aab4c2;--good:#177a50;--warn:#a15c00;--bad:#c02b2b;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#0f141b;--card:#181f29;--ink:#e6ebf2;--soft:#98a4b5;
--rule:#2a3442;--base:#566375;--good:#4fd09a;--warn:#f0b04c;--bad:#ff7a76;DARK}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1500px;margin:0 auto;padding:24px 28px 40px}
header{display:flex;flex-wrap:wrap;gap:4px 24px;align-items:baseline;margin-bottom:18px}
h1{font-size:22px;font-weight:650;margin:0;letter-spacing:-.01em}
header p,footer{margin:0;color:var(--soft);font-size:13px;overflow-wrap:anywhere}
h2{font-size:15px;font-weight:650;margin:30px 0 10px}
.note{border-left:3px solid var(--warn);padding:6px 12px;margin:0 0 12px;background:var(--card);
font-size:13px;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;
min-width:0}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(4,minmax(0,1fr))}
.tile{display:flex;flex-direction:column}
.tile h3{margin:0;font-size:13px;font-weight:550;color:var(--soft)}
.tile .main{font-size:27px;line-height:1.2;font-weight:650;margin:4px 0 2px;
font-variant-numeric:tabular-nums;letter-spacing:-.02em;white-space:nowrap}
.tile .main small{font-size:13px;font-weight:500;color:var(--soft);letter-spacing:0}
.tile dl{margin:0 0 8px;font-size:12.5px;color:var(--soft)}
.tile dl div{display:flex;justify-content:space-between;gap:8px}
.tile dd{margin:0;color:var(--ink);font-variant-numeric:tabular-nums;white-space:nowrap}
.tile .spark{margin-top:auto}
.warn{color:var(--warn)}.bad{color:var(--bad)}
.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr))}
.chart{display:flex;flex-direction:column}
.chart h3,.table h3{margin:0;font-size:14px;font-weight:600}
.chart p,.table p{margin:1px 0 8px;font-size:12.5px;color:var(--soft)}
svg{display:block}
.part+.part{margin-top:14px}
.plot,.spark{width:100%;overflow:visible}
.plot text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.plot text.y{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
.grid{stroke:var(--rule)}.base{stroke:var(--base)}
.line{fill:none;stroke-width:1.75;stroke-linecap:round;stroke-linejoin:round;
vector-effect:non-scaling-stroke}
.area{stroke:none;fill-opacity:.28}
.band rect{fill:transparent}
.band line{stroke:var(--soft);stroke-width:1;vector-effect:non-scaling-stroke;opacity:0}
.band:hover line{opacity:.8}
.legend{list-style:none;margin:6px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 14px;
font-size:12.5px}
.legend li{display:flex;align-items:center;gap:5px;color:var(--soft);min-width:0;
overflow-wrap:anywhere}
.legend b{color:var(--ink);font-weight:550;font-variant-numeric:tabular-nums;white-space:nowrap}
.legend .key{flex:none}
.none{height:186px;display:grid;place-items:center;color:var(--soft);
font-size:13px;border-bottom:1px solid var(--base)}
.tables{display:grid;gap:12px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{font-weight:550;color:var(--soft);text-align:right;padding:4px 10px;white-space:nowrap}
td{padding:5px 10px;border-top:1px solid var(--rule);text-align:right;white-space:nowrap}
th.key,td.key{text-align:left;padding-left:0}
td .bar{display:inline-block;vertical-align:middle;margin-left:8px}
.bar .whole{fill:var(--rule)}
.heat .scroll{max-height:320px;overflow-y:auto}
.heat table{border-spacing:2px;border-collapse:separate}
.heat td,.heat tbody th{border:0;padding:7px 10px;border-radius:4px}
.heat td{text-align:center}.heat thead th{text-align:center}
.heat th.key{text-align:left;padding-left:0;font-weight:500;color:var(--ink)}
.heat thead th.key{color:var(--soft)}
.ramp{display:flex;align-items:center;gap:2px;margin-top:auto;padding-top:10px;font-size:11px;
color:var(--soft)}
.ramp i{width:14px;height:8px;border-radius:2px}
.ramp span:first-child{margin-right:4px}.ramp span:last-child{margin-left:4px}
footer{margin-top:28px}
@media (max-width:860px){.tiles{grid-template-columns:1fr 1fr}}
@media (max-width:600px){main{padding:16px 12px 28px}.tiles{gap:8px}
.card{padding:12px}.tile .main{font-size:23px}.tile dl{font-size:12px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""


def _colours(values: tuple[str, ...]) -> str:
    return "".join(f"--s{number}:{value};" for number, value in enumerate(values))


def _heat(values: tuple[str, ...]) -> str:
    """The first colour in parts: with an opacity, a step of a heat map."""
    red, green, blue = bytes.fromhex(values[0][1:])
    return f"--heat:{red},{green},{blue};"


def _classes() -> str:
    return "".join(
        f".line.s{n}{{stroke:var(--s{n})}}.area.s{n},rect.s{n}{{fill:var(--s{n})}}"
        for n in range(len(_LIGHT))
    )


def _steps() -> str:
    """From the card's own colour to one on which the page's ink is still read well."""
    return "".join(
        f".h{n}{{background:rgba(var(--heat),{0.04 + 0.56 * n / NUM_STEPS:.2f})}}"
        for n in range(NUM_STEPS + 1)
    )


STYLE = (
    _SHEET.replace("LIGHT", _colours(_LIGHT) + _heat(_LIGHT)).replace(
        "DARK", _colours(_DARK) + _heat(_DARK)
    )
    + _classes()
    + _steps()
)
