"""The main job as one call: `run_demo` fine-tunes a real language model through the real server and says what came of it."""
