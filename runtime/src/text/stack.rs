use std::thread;

use super::{Result, TextError};

/// Runs the template engine on a stack of its own.
///
/// The engine recurses over what templates nest: expressions when it compiles, values when it
/// compares, prints or drops them, one frame for each level. Templates are untrusted and nest
/// cheaply, so the stack is as large as their other limits allow levels. It is address space
/// until it is touched. A panic of the engine becomes an error.
///
/// # Errors
/// Those of `work`, and [`TextError::Template`] if the thread can't start or panics.
pub(super) fn with_stack<T: Send>(
    bytes: usize,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let failed = |reason: String| Err(TextError::Template { line: None, reason });
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("chat template".to_owned()).stack_size(bytes);
        match builder.spawn_scoped(scope, work) {
            Ok(thread) => {
                thread.join().unwrap_or_else(|_| failed("the template engine panicked".to_owned()))
            }
            Err(error) => failed(format!("no thread with {bytes} bytes of stack: {error}")),
        }
    })
}
