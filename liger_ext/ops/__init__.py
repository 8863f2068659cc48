"""One file per op: its fake implementation, its autograd formula, and the public function with its documentation."""
