# Every target says what it does; `make` alone lists them.
PY := .venv/bin/python

.PHONY: help
help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: check
check: ## ruff, mypy --strict, import contracts
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && PYTHONPATH=runtime/src:operator/src .venv/bin/lint-imports

.PHONY: test
test: ## the fast tests
	PYTHONPATH=runtime/src:operator/src .venv/bin/pytest -q
