from vocab_parallel_ce.cli import main

raise SystemExit(main())
