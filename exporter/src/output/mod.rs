//! Writes files that are whole or not there: as `.NAME.partial` beside the target, renamed when
//! they are complete.

mod monitor;
mod pending;
mod random;
mod weights;

pub use monitor::{Interrupt, Monitor};
pub use pending::{Pending, persist_all};
pub(crate) use pending::{Sink, claim, parent, partial, sync_dir};
pub use random::{random_digests, write_random_weights};
pub use weights::{Item, Written, write_weights};
pub(crate) use weights::{WeightWriter, lay_out, stream};
