//! Writes files that are whole or not there: into a temporary file beside the target, renamed
//! when it is complete.

mod monitor;
mod pending;
mod random;
mod weights;

pub use monitor::{Interrupt, Monitor};
pub use pending::{Pending, persist_all};
pub(crate) use pending::{parent, sync_dir};
pub use random::{random_digests, write_random_weights};
pub use weights::{Item, Written, write_weights};
