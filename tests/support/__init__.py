"""What several tests share: tiny runs, model cases, oracles. Imported as ``support.NAME``."""
