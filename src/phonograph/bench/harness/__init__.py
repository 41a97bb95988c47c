"""lm-evaluation-harness on the offline API, and tasks of its that need no download (extra `eval`).

python -m phonograph.bench.harness run --model phonograph --model_args model=demo --tasks demo_problems
"""
