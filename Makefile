# `make demo` and `make test` work in a fresh clone: Python 3.11, make and git are all they assume.
# Installing is repeated only when the locks, pyproject.toml or the installer have changed.

VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
LOCKS := requirements/run.lock requirements/build.lock requirements/dev.lock requirements/site.lock requirements/release.lock requirements/fuzz.lock

.PHONY: help install demo test check lint format types imports yaml pages bench docs site chaos chaos-tests platforms fuzz dist sbom audit lock pin-images clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo     the main job from end to end, on this machine alone'
	@echo 'make test     every test; ARGS="-k webhook" for some of them'
	@echo 'make check    lint, format, types, import rules, YAML, generated pages'
	@echo 'make install  the relay and what its development needs, into $(VENV)'
	@echo 'make bench    measures here, and writes docs/performance.md; ARGS=burst for one metric'
	@echo 'make chaos    lets everything fail around a relay, and writes docs/proof.md; TIER=full takes hours'
	@echo 'make chaos-tests  the tests that kill, freeze and cut, again and again: ROUNDS=10'
	@echo 'make fuzz     fuzzes the parsers for MINUTES=10 each; TARGETS="date yaml" for some of them'
	@echo 'make platforms  demo and test on bare Debian machines, as root: PLATFORMS="bookworm trixie"'
	@echo 'make docs     writes the generated pages of docs/ again'
	@echo 'make site     docs/ as a site with search, in build/site; a broken link is an error'
	@echo 'make dist     wheel and source distribution of the last commit, built twice and compared'
	@echo 'make sbom     the bill of materials of the locked packages, beside them'
	@echo 'make audit    known vulnerabilities of the locked packages, where an index can be asked'
	@echo 'make lock     newest versions within the bounds of pyproject.toml, with hashes'
	@echo 'make pin-images  the digests of the official images, as a registry names them now'
	@echo 'make clean    removes $(VENV), the site and every cache'

$(VENV)/.run: requirements/run.lock requirements/build.lock pyproject.toml requirements/install
	@requirements/install run $(VENV)
	@touch $@

$(VENV)/.dev: requirements/dev.lock pyproject.toml requirements/install
	@requirements/install dev $(VENV)
	@touch $(VENV)/.run $@

install: $(VENV)/.dev

demo: $(VENV)/.run
	@$(BIN)/imds-relay demo $(ARGS)

# In a fresh clone, six workers of pytest would each rewrite the assertions of all tests. Two halves
# are rewritten at the same time before, once. A test that cannot be imported fails later, in its run.
HALVES := 'tests/[a-c]*/' 'tests/[d-z]*/ tests/test_*.py'
$(VENV)/.rewritten: $(VENV)/.dev
	@printf '%s\n' $(HALVES) | xargs -P 2 -I % sh -c '$(BIN)/python -m pytest --collect-only -q % >/dev/null' || true
	@touch $@

# Most tests wait for something: six at a time keep two cores busy. ARGS="-n 0" for one after the other.
WORKERS := -n 6 --dist loadfile --no-loadscope-reorder
test: export PYTHONDONTWRITEBYTECODE := # pytest keeps the assertions that it has rewritten
test: $(VENV)/.rewritten
	@$(BIN)/python -m compileall -q relay tests # hundreds of processes import them
	@$(BIN)/python -m tests.prerequisites test $(BIN)/python -m pytest $(WORKERS) $(ARGS)

# One line for each step; what a failed one said is shown whole.
step = @printf '%s … ' '$(1)'; if said=$$($(2) 2>&1); then echo ok; else echo failed; printf '%s\n' "$$said"; exit 1; fi

check: lint format types imports yaml pages

lint: $(VENV)/.dev
	$(call step,lint,$(BIN)/ruff check --no-fix .)

format: $(VENV)/.dev
	$(call step,format,$(BIN)/ruff format --diff .)

types: $(VENV)/.dev
	$(call step,types,$(BIN)/mypy)

imports: $(VENV)/.dev
	$(call step,import rules,$(BIN)/lint-imports --no-logo)

yaml: $(VENV)/.dev
	$(call step,YAML,git ls-files '*.yml' '*.yaml' | xargs $(BIN)/yamllint --strict)

pages: $(VENV)/.dev
	$(call step,generated pages,$(BIN)/python -m docs.generate --check)

bench: $(VENV)/.dev
	@$(BIN)/python -m tests.prerequisites bench $(BIN)/python -m bench --write $(ARGS)

# TIER=full takes hours. ARGS="--only kill --rounds 500" for one fault.
TIER ?= quick
chaos: $(VENV)/.dev
	@$(BIN)/python -m tests.prerequisites chaos $(BIN)/python -m chaos --tier $(TIER) --write $(ARGS)

# The tests that kill, freeze and cut, again and again: what happens once in a hundred times shows itself.
ROUNDS ?= 10
CHAOS_TESTS := tests/approvals tests/journey tests/store tests/delivery tests/sinks/test_rabbitmq_outage.py tests/fleet
round = echo "== round $$number of $(ROUNDS)"; RELAY_TEST_CHAOS=1 $(BIN)/python -m pytest -q -x $(CHAOS_TESTS) $(ARGS) || exit 1
chaos-tests: $(VENV)/.dev
	@$(BIN)/python -m tests.prerequisites chaos sh -c 'for number in $$(seq $(ROUNDS)); do $(round); done'

# STEPS=demo for one of the two.
PLATFORMS ?=
platforms: export ARGS := $(ARGS)
platforms:
	@tests/platforms.sh $(PLATFORMS)

docs: $(VENV)/.dev
	@$(BIN)/python -m docs.generate

# Sphinx and its theme have an environment of their own: nothing else needs them.
SITE := $(VENV)-site
$(SITE)/.made: requirements/site.lock requirements/install
	@requirements/install site $(SITE)
	@touch $@

site: $(SITE)/.made $(VENV)/.run
	@$(SITE)/bin/sphinx-build --fail-on-warning --keep-going --quiet --conf-dir docs/site . build/site
	@$(BIN)/imds-relay schema >build/site/schemas.json
	@echo 'the site begins at build/site/index.html'

# So has the fuzzer, with the relay from the clone.
FUZZ := $(VENV)-fuzz
MINUTES ?= 10
TARGETS ?=
$(FUZZ)/.made: requirements/run.lock requirements/fuzz.lock requirements/install
	@requirements/install fuzz $(FUZZ)
	@touch $@

fuzz: $(FUZZ)/.made
	@$(FUZZ)/bin/python -m fuzz --minutes $(MINUTES) $(TARGETS)

# So has what looks after the packages.
RELEASE := $(VENV)-release
$(RELEASE)/.made: requirements/release.lock requirements/install
	@requirements/install release $(RELEASE)
	@touch $@

dist: $(VENV)/.run
	@requirements/dist $(BIN)/python $(TAG)

sbom: $(RELEASE)/.made
	@mkdir -p dist
	@PYTHONWARNINGS=ignore $(RELEASE)/bin/cyclonedx-py requirements requirements/run.lock --pyproject pyproject.toml \
		--output-reproducible --sv 1.6 --of JSON -o dist/imds_relay-$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml).cdx.json

audit: $(RELEASE)/.made
	@$(RELEASE)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/run.lock -r requirements/build.lock

# Every wheel and platform of each version is in the lock; no address of a registry is.
compile = uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
lock:
	@command -v uv >/dev/null || { echo 'make lock needs uv: https://docs.astral.sh/uv' >&2; exit 1; }
	@rm -f $(LOCKS)
	@$(compile) pyproject.toml --all-extras --group build --group dev --output-file requirements/dev.lock
	@$(compile) pyproject.toml --all-extras --constraints requirements/dev.lock --output-file requirements/run.lock
	@$(compile) --group build --constraints requirements/dev.lock --output-file requirements/build.lock
	@$(compile) --group site --output-file requirements/site.lock
	@$(compile) --group fuzz --output-file requirements/fuzz.lock
	@$(compile) --group release --constraints requirements/dev.lock --output-file requirements/release.lock
	@! grep -n '://' $(LOCKS)
	@echo 'locked: $(LOCKS)'

pin-images:
	@requirements/pin-images

clean:
	rm -rf $(VENV) $(SITE) $(RELEASE) $(FUZZ) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
