//! A bundle that is being made, and how a later run continues it.
//!
//! Beside the output `NAME` lies, until it is complete, the directory `.NAME.partial`:
//!
//! - `bundle/`, which becomes `NAME`;
//! - `journal`, a line of JSON for the job, and then one for each weight that is safely on the
//!   disk;
//! - `replaced`, while it is renamed: the bundle that stood under `NAME`.
//!
//! It is locked by the process that writes it. A run that ends early, whatever ended it, leaves it
//! if it holds finished weights; the next run of the same job verifies these and continues, and the
//! next run of another job empties it.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use gemma4_format::Digest;
use serde::{Deserialize, Serialize};

use super::Loss;
use crate::output::{Monitor, Pending, claim, parent, partial, persist_all, sync_dir};
use crate::{Error, Result};

/// What tells one job from another.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    /// Program and version.
    pub(super) producer: String,
    /// [`crate::checkpoint::Checkpoint::stamp`].
    pub(super) source: String,
    /// [`super::Recipe::digest`].
    pub(super) recipe: String,
    /// BLAKE3, in hex, of the header of the weight file.
    pub(super) layout: String,
}

impl Job {
    /// What differs from an earlier job.
    fn difference(&self, earlier: &Self) -> Option<&'static str> {
        if self.producer != earlier.producer {
            Some("by another version")
        } else if self.source != earlier.source {
            Some("from a checkpoint that has changed since")
        } else if self.recipe != earlier.recipe || self.layout != earlier.layout {
            Some("by another recipe")
        } else {
            None
        }
    }
}

/// A weight that is on the disk.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Finished {
    weight: String,
    /// In hex.
    digest: String,
    /// The bits of the three numbers, since decimal ones may be rounded.
    loss: Option<(u64, u64, u32)>,
}

impl Finished {
    pub(super) fn new(weight: &str, digest: &Digest, loss: Option<&Loss>) -> Self {
        let bits = |l: &Loss| (l.signal.to_bits(), l.noise.to_bits(), l.max_error.to_bits());
        let digest = blake3::Hash::from_bytes(*digest).to_hex().to_string();
        Self { weight: weight.to_owned(), digest, loss: loss.map(bits) }
    }

    /// Whether it is that weight with these bytes.
    pub(super) fn is(&self, weight: &str, digest: &Digest) -> bool {
        let found = blake3::Hash::from_bytes(*digest);
        self.weight == weight && blake3::Hash::from_hex(&self.digest).is_ok_and(|d| d == found)
    }

    pub(super) fn loss(&self) -> Option<Loss> {
        self.loss.map(|(signal, noise, max_error)| Loss {
            signal: f64::from_bits(signal),
            noise: f64::from_bits(noise),
            max_error: f32::from_bits(max_error),
        })
    }
}

/// The directory of an unfinished bundle, locked.
#[derive(Debug)]
pub(super) struct Unfinished {
    path: PathBuf,
    output: PathBuf,
    /// Holds the lock.
    _lock: File,
    /// Lines of the journal.
    kept: usize,
}

impl Unfinished {
    /// Takes possession of the directory beside `output`, which is made if need be.
    ///
    /// # Errors
    /// [`Error::OutputBusy`] if another process has it.
    pub(super) fn claim(output: &Path) -> Result<Self> {
        let dir = parent(output);
        fs::create_dir_all(dir).map_err(Error::io("create directory", dir))?;
        let path = partial(output);
        let lock = claim(&path, |path| match fs::create_dir(path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _ if !fs::symlink_metadata(path)?.is_dir() => Err(io::ErrorKind::NotADirectory.into()),
            _ => File::open(path),
        })?;
        let unfinished = Self { path, output: output.to_owned(), _lock: lock, kept: 0 };
        let replaced = unfinished.path.join("replaced");
        if replaced.exists() {
            // An earlier run ended between its two renames, or after both.
            match output.exists() {
                false => fs::rename(&replaced, output).map_err(Error::io("restore", output))?,
                true => fs::remove_dir_all(&replaced).map_err(Error::io("remove", &replaced))?,
            }
        }
        Ok(unfinished)
    }

    /// The directory that becomes the bundle.
    pub(super) fn bundle(&self) -> PathBuf {
        self.path.join("bundle")
    }

    /// What an earlier run of this job has finished, in order; after one of another job, nothing.
    pub(super) fn finished(&self, job: &Job, monitor: &Monitor) -> VecDeque<Finished> {
        let text = fs::read_to_string(self.journal()).unwrap_or_default();
        let mut lines = text.lines();
        let Some(earlier) = lines.next() else { return VecDeque::new() };
        let why = match serde_json::from_str(earlier) {
            Ok(earlier) => job.difference(&earlier),
            Err(_) => Some("by another version"),
        };
        if let Some(why) = why {
            let path = self.path.display();
            monitor.note(&format!("what `{path}` holds was made {why}; starting over"));
            return VecDeque::new();
        }
        // A line that was not written to its end is no weight.
        lines.map_while(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Removes what an earlier run has left of the bundle, and makes its directory.
    pub(super) fn clear(&self) -> Result<()> {
        let bundle = self.bundle();
        match fs::remove_dir_all(&bundle) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", &bundle)(e)),
            _ => fs::create_dir(&bundle).map_err(Error::io("create directory", &bundle)),
        }
    }

    /// Begins the journal, with what is kept of an earlier run.
    pub(super) fn begin(&mut self, job: &Job, kept: &[Finished]) -> Result<()> {
        let mut text = line(job);
        kept.iter().for_each(|finished| text += &line(finished));
        persist_all([Pending::with_bytes(self.journal(), text.as_bytes())?])?;
        self.kept = kept.len();
        Ok(())
    }

    /// Notes weights that are on the disk.
    pub(super) fn add(&mut self, finished: &[Finished]) -> Result<()> {
        let journal = self.journal();
        let failed = |e| Error::io("write", &journal)(e);
        let mut file = File::options().append(true).open(&journal).map_err(failed)?;
        let text: String = finished.iter().map(line).collect();
        file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).map_err(failed)?;
        self.kept += finished.len();
        Ok(())
    }

    /// Leaves finished weights for the next run and says so, or with `keep` false removes them.
    pub(super) fn end_early(mut self, keep: bool, monitor: &Monitor) {
        if !keep {
            self.kept = 0;
        } else if self.kept > 0 {
            monitor.note(&format!(
                "`{}` keeps the {} weights that are done; the same command continues there",
                self.path.display(),
                self.kept
            ));
        }
    }

    /// Gives the complete bundle its name, in place of what has it.
    pub(super) fn install(mut self) -> Result<()> {
        let (bundle, replaced) = (self.bundle(), self.path.join("replaced"));
        sync_dir(&bundle)?;
        let output = &self.output;
        let had_one = match fs::rename(output, &replaced) {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(Error::io("replace", output)(e)),
        };
        if let Err(e) = fs::rename(&bundle, output) {
            if had_one {
                fs::rename(&replaced, output).map_err(Error::io("restore", output))?;
            }
            return Err(Error::io("create", output)(e));
        }
        sync_dir(parent(output))?;
        self.kept = 0;
        Ok(())
    }

    fn journal(&self) -> PathBuf {
        self.path.join("journal")
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.kept == 0 {
            // Nobody could be told, and the next run takes it over.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Plain data always have a JSON form.
fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() + "\n"
}
