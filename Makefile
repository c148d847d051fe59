# kvnotes. `make probe-locality` and `make test` set up what they need.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
LIGHT  := $(VENV)/.light
MODELS ?= qwen2.5-coder-0.5b qwen2.5-coder-1.5b

# MODEL TASK PAIR WORDING LAYOUT N SEED LENGTH DEVICE DTYPE ENGINE MEMORY RESULTS OUT: each is the flag of its name; unset keeps the default.
quote = '$(subst ','\'',$(1))'
flag  = $(if $($(1)),--$(2) $(call quote,$($(1))))
FLAGS = $(strip $(call flag,MODEL,model) $(call flag,TASK,task) $(call flag,PAIR,pair) $(call flag,WORDING,wording) \
        $(call flag,LAYOUT,layout) \
        $(call flag,N,n) $(call flag,SEED,seed) $(call flag,LENGTH,length) $(call flag,DEVICE,device) \
        $(call flag,DTYPE,dtype) $(call flag,ENGINE,engine) \
        $(call flag,MEMORY,memory) $(call flag,RESULTS,results))

# A study's name is its file's stem; its module is found in the packages that hold studies.
STUDIES := $(basename $(notdir $(filter-out %/__init__.py,$(wildcard probes/*.py circuits/*.py))))
module   = $(if $(filter $(1),$(STUDIES)),$(subst /,.,$(basename $(wildcard probes/$(1).py circuits/$(1).py))))

# A misspelled setting would be ignored, and the default model measured for minutes.
KNOWN := MODEL TASK PAIR WORDING LAYOUT N SEED LENGTH DEVICE DTYPE ENGINE MEMORY RESULTS MODELS ONLY QUICK R OUT ARGS PYTHON VENV
GIVEN := $(foreach v,$(.VARIABLES),$(if $(filter command line,$(origin $(v))),$(v)))
$(if $(filter-out $(KNOWN),$(GIVEN)),$(error unknown setting $(filter-out $(KNOWN),$(GIVEN)); known: $(KNOWN)))

.PHONY: help setup check test models tasks probes families circuit calibrate figures report claims show ls export verify bench docs clean

help: ## what each target does
	@awk 'BEGIN {FS = ":.*## "} /^[a-z%-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  studies: $(STUDIES)"
	@echo "  settings: MODEL= TASK= PAIR= WORDING= LAYOUT= N= SEED= LENGTH= DEVICE= DTYPE= ENGINE= MEMORY= RESULTS= ARGS=\"--draws 5\" (a study's own)"

setup: $(READY) ## create .venv with the versions known to work together

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kvnotes needs Python 3.11 or later: set PYTHON=" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[models,dev]'
	touch $@

# records are drawn without torch: where there is no environment yet, one without it is enough
$(LIGHT): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

check: $(READY) ## lint, format and types, as the CI runs them
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

test: $(READY) ## all tests; fetches smollm2-135m, and skips what needs larger models that are not in the cache
	$(PY) -m kvnotes.cli models --model smollm2-135m >/dev/null
	$(PY) -m pytest -n auto $(ARGS)

models: $(READY) ## the registry and what is in the cache; MODEL=<name> fetches one
	$(PY) -m kvnotes.cli models $(call flag,MODEL,model)

tasks: $(READY) ## a coloured sample prompt with its spans, and competence by layout and scenario
	$(PY) -m kvnotes.cli tasks $(FLAGS)

probe-%: $(READY) ## one study, such as probe-locality: record, figure, printed summary
	@test -n '$(call module,$*)' || { echo "error: there is no study of that name; known: $(STUDIES)" >&2; exit 2; }
	$(PY) -m $(call module,$*) $(FLAGS)$(if $(ARGS), $(ARGS))

probes: $(addprefix probe-,$(STUDIES)) ## every study, one after the other, and a table of what they found
	$(PY) -m kvnotes.cli overview $(call flag,MODEL,model) $(call flag,RESULTS,results)

OTHERS := $(filter-out MODEL PAIR WORDING,TASK LAYOUT N SEED LENGTH DEVICE DTYPE ENGINE MEMORY RESULTS)
DRAW = $(PY) -m figures.build $(if $(RESULTS),$(call quote,$(RESULTS)) --out $(call quote,$(RESULTS)/figures),results)
# several studies on MODELS: $(call on-models,studies,settings that are taken away)
on-models = +@set -e; for model in $(MODELS); do for study in $(1); do \
	  $(MAKE) --no-print-directory probe-$$study $(2) MODEL=$$model $(foreach v,$(OTHERS),$(if $($(v)),$(v)=$(call quote,$($(v))))); done; done
# and their pages: $(call pages,names). A page shows one layout; LAYOUT=all measures every one, and the pages show the default
pages = $(DRAW) $(if $(filter all,$(LAYOUT)),,$(call flag,LAYOUT,layout)) $(foreach page,$(1),--only $(page)) \
	  $(foreach m,$(MODELS),--model $(call quote,$(m)))

# each study has its own kind of pair, so PAIR= and WORDING= are taken away, which make would hand on by itself
FAMILY := locality dissociation specificity injection timing
families: $(READY) ## the paper's tables 3 and 4: five studies on MODELS="a b", side by side
	$(call on-models,$(FAMILY),PAIR= WORDING=)
	$(call pages,table3 table4)

CIRCUIT := heads direction attribution scrubbing sae
circuit: $(READY) ## the paper's figure 15 and table 5: the five circuit studies on MODELS="a b"
	$(call on-models,$(CIRCUIT))
	$(call pages,fig15 table5)

calibrate: $(READY) ## every study on every planted model, expected beside measured
	$(PY) -m kvnotes.cli calibrate $(call flag,RESULTS,results)

figures: $(or $(wildcard $(READY)),$(LIGHT)) ## every figure and table from the records under results/; ONLY="fig3a table5 suffix" and MODELS="a b" for some
	$(DRAW) $(call flag,LAYOUT,layout) $(foreach one,$(ONLY),--only $(call quote,$(one))) \
	  $(if $(filter-out file,$(origin MODELS)),$(foreach m,$(MODELS),--model $(call quote,$(m))))

claims: $(READY) ## docs/claims.md: which of the paper's claims the records support, by model
	$(PY) -m figures.claims $(if $(RESULTS),$(call quote,$(RESULTS)) --out $(call quote,$(RESULTS)/claims.md),results)

# MODELS has a default, which is not what a report of every record asks for
ASKED = $(if $(filter-out file default undefined,$(origin MODELS)),$(foreach m,$(MODELS),--model $(call quote,$(m))))
report: $(or $(wildcard $(READY)),$(LIGHT)) ## one HTML page of every record, figures and a view of the tokens included; MODELS="a b" picks models
	$(PY) -m figures.webpage $(if $(RESULTS),$(call quote,$(RESULTS)) --out $(call quote,$(RESULTS)/figures/report.html),results)$(if $(ASKED), $(ASKED))

show: $(READY) ## print a record: R=results/<model>/<study>/<layout>.json
	@test -n $(call quote,$(R)) || { echo "error: name a record: make show R=results/<model>/<study>/<layout>.json" >&2; exit 2; }
	$(PY) -m kvnotes.cli show $(call quote,$(R))

ls: $(READY) ## every record, and whether the code of now still fits it
	$(PY) -m kvnotes.cli ls $(call flag,MODEL,model) $(call flag,RESULTS,results)

# R may be several records or folders, so it is not quoted
WHICH = $(or $(R),$(if $(RESULTS),$(call quote,$(RESULTS))),results)
export: $(READY) ## records as one tidy table: OUT=table.csv or .parquet, R="records or folders" (default: all)
	@test -n $(call quote,$(OUT)) || { echo "error: name the table: make export OUT=table.csv" >&2; exit 2; }
	$(PY) -m kvnotes.cli export $(WHICH) $(call flag,OUT,out)

verify: $(READY) ## recompute every summary, hash and seed: R="records or folders" (default: all)
	$(PY) -m kvnotes.cli verify $(WHICH)

bench: $(READY) ## the engine beside TransformerLens and Hugging Face, 15 minutes; QUICK=1 is under 4
	$(PY) -m bench $(if $(QUICK),--quick) $(call flag,MODEL,model) $(call flag,DEVICE,device) $(call flag,DTYPE,dtype) \
	  $(if $(RESULTS),--out $(call quote,$(RESULTS)/bench))

docs: $(READY) ## the API reference from the docstrings, to build/docs
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(PY) -m pdoc --docformat google --output-directory build/docs kvnotes tasks probes circuits figures

clean: ## remove the environment and tool caches; records, figures and weights stay
	rm -rf $(VENV) build ./*.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
